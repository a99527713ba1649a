"""typesafe-sdk, the Python package: decisions over its System One API."""

import harness
import typesafe_sdk
from harness import CHAT, QUESTION, expect
from typesafe_sdk import Choice, Noul, Score, TypeSafeClient

client = TypeSafeClient(api_key=harness.KEY, base_url=harness.ROUTER)


def decide(**questions: object) -> object:
    return client.system_one(state={"said": QUESTION}, model=CHAT, questions=questions).answers


def predicates() -> None:
    found = decide(asks=Noul(instructions="The user asks a question."))["asks"]
    expect(0 <= found.noul <= 1, found)


def choices() -> None:
    found = decide(code=Choice(instructions="Which?", criteria={"LIS": "Lisbon", "OSL": None}))["code"]
    expect(found.choice in ("LIS", "OSL") and abs(sum(found.probabilities.values()) - 1) < 1e-6, found)


def scores() -> None:
    found = decide(heat=Score(criteria=["cold", "mild", "hot"]))["heat"]
    expect(0 <= found.score <= 2 and list(found.legend.values())[2] == "hot", found)


def errors() -> None:
    asks = {"asks": Noul(instructions="It asks.")}
    harness.expect_raised(
        typesafe_sdk.TypeSafeNotFoundError, lambda: client.system_one(state="x", model="nope", questions=asks), "nope"
    )


if __name__ == "__main__":
    harness.main("typesafe-sdk", {"predicates": predicates, "choices": choices, "scores": scores, "errors": errors})

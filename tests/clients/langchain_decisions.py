"""langchain-openai: decisions."""

import harness
from harness import CHAT, QUESTION, expect
from langchain_openai.decisions import Choice, OpenAIDecisions, Predicate, Score

decider = OpenAIDecisions(model=CHAT, api_key=harness.KEY, base_url=harness.OPENAI_URL, max_retries=0)
PREDICATE = Predicate(instructions="The user asks a question.")
CHOICE = Choice(instructions="Which airport code?", choices={"LIS": "Lisbon", "OSL": None})
SCORE = Score(instructions="How hot is it?", levels=["cold", "mild", "hot"])


def decide(**questions: object) -> object:
    return decider.invoke({"input": QUESTION, "questions": questions})


def predicates() -> None:
    found = decide(asks=PREDICATE).predicates["asks"]
    expect(0 <= found.probability <= 1, found)


def choices() -> None:
    found = decide(code=CHOICE, asks=PREDICATE).choices["code"]
    expect(found.choice in ("LIS", "OSL") and 0 <= found.confidence <= 1, found)


def scores() -> None:
    found = decide(heat=SCORE).scores["heat"]
    expect(0 <= found.score <= 2, found)


def errors() -> None:
    harness.expect_raised(Exception, lambda: OpenAIDecisions(
        model="nope", api_key=harness.KEY, base_url=harness.OPENAI_URL, max_retries=0
    ).invoke({"input": QUESTION, "questions": {"asks": PREDICATE}}), "nope")  # fmt: skip


if __name__ == "__main__":
    harness.main("langchain-openai", {"predicates": predicates, "choices": choices, "scores": scores, "errors": errors})

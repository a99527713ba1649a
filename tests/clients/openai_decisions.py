"""openai, the Python package: decisions."""

import harness
import openai
from harness import CHAT, QUESTION, expect

client = openai.OpenAI(base_url=harness.OPENAI_URL, api_key=harness.KEY, max_retries=0)
PREDICATE = {"type": "predicate", "name": "asks", "instructions": "The user asks a question."}
CHOICE = {
    "type": "choice", "name": "code", "instructions": "Which airport code?",
    "choices": [{"value": "LIS", "description": "Lisbon"}, {"value": "OSL", "description": "Oslo"}, {"value": True}],
}  # fmt: skip
SCORE = {
    "type": "score", "name": "heat", "instructions": "How hot is it?",
    "levels": [{"label": "cold"}, {"label": "mild"}, {"label": "hot"}],
}  # fmt: skip


def decide(*questions: object, **options: object) -> openai.types.Decision:
    return client.decisions.create(**{"model": CHAT, "input": QUESTION, "questions": questions, **options})


def predicates() -> None:
    (asks,) = decide(PREDICATE).answers
    expect(0 <= asks.probability <= 1 and asks.name == "asks", asks)
    items = [
        {"role": "user", "content": [{"type": "input_json", "data": {"a": 1}}, {"type": "input_text", "text": "Hi"}]}
    ]
    expect(0 <= decide(PREDICATE, input=items).answers[0].probability <= 1, items)


def choices() -> None:
    """Check that a question gets the same answer alone and among others."""
    found = decide(PREDICATE, CHOICE, SCORE)
    code = found.answers[1]
    expect([each.value for each in code.probabilities] == ["LIS", "OSL", True] and 0 <= code.confidence <= 1, code)
    expect(abs(sum(each.probability for each in code.probabilities) - 1) < 1e-6, code)
    (alone,) = decide(CHOICE).answers
    expect(abs(alone.probabilities[0].probability - code.probabilities[0].probability) < 1e-4, (alone, code))
    expect(found.usage.input_tokens == found.usage.total_tokens, found.usage)


def scores() -> None:
    (heat,) = decide(SCORE).answers
    expect(0 <= heat.score <= 2 and [each.label for each in heat.probabilities] == ["cold", "mild", "hot"], heat)


def errors() -> None:
    harness.expect_raised(openai.BadRequestError, decide, "questions")
    harness.expect_raised(openai.NotFoundError, lambda: decide(PREDICATE, model="nope"), "nope")
    harness.expect_raised(
        openai.BadRequestError, lambda: decide({**CHOICE, "choices": CHOICE["choices"][:1]}), "choices"
    )


if __name__ == "__main__":
    harness.main("openai", {"predicates": predicates, "choices": choices, "scores": scores, "errors": errors})

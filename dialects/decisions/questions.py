"""A decision: a state, questions with known options about it, and the probability of each option.

A chat model gets the state, which all questions of a request share, followed by one question at the end of the user's turn. An option's probability
is that of its label as the model's answer, normalised over the options. The formulas of confidence are those of TypeSafe's Choice and Score. This
module is independent of dialects and tokens.
"""

from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct

from pilotlight.dialects.requests import Conversation, ValidGeneration

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_LEVELS = 10

# Template variables that make a chat model answer without thinking first.
UNTHINKING: dict[str, Any] = {"enable_thinking": False, "thinking": False}


class Option(Struct, frozen=True):
    """A possible answer; `label` is the text that the model scores."""

    label: str
    description: str = ""


class Question(Struct, frozen=True):
    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[Option, ...]
    name: str | None = None

    @property
    def text(self) -> str:
        """Return the question for the model. It is short, because it is prefilled for each question."""
        described = [f"{option.label}: {option.description}" for option in self.options if option.description]
        asked = [self.instructions] if self.instructions else []
        if self.kind == "predicate":
            return "\n".join(["Does this hold?", *asked, *described, "Answer yes or no."])
        if not described:
            return "\n".join([*asked, f"Answer with one of: {', '.join(option.label for option in self.options)}"])
        lines = [
            f"{option.label}: {option.description}" if option.description else option.label for option in self.options
        ]
        return "\n".join([*asked, "Answer with one of these, by the label before the colon:", *lines])


def predicate(instructions: str, name: str | None = None, yes: str = "", no: str = "") -> Question:
    """Return a question whose answers are yes and no, in this order."""
    return Question("predicate", instructions, (Option("yes", yes), Option("no", no)), name)


def score(instructions: str, levels: Sequence[str], name: str | None = None) -> Question:
    """Return a question whose answers are the numbers of the levels, starting at 0."""
    return Question("score", instructions, tuple(Option(str(i), level) for i, level in enumerate(levels)), name)


class ValidDecision(ValidGeneration, frozen=True):
    """A request for decisions. Its prompt is the state."""

    questions: tuple[Question, ...] = ()

    def asked(self, question: Question) -> Conversation:
        """Return the state followed by a question.

        Both are in one turn, because templates refuse two user turns in a row."""
        state = self.prompt
        assert isinstance(state, Conversation)
        *before, last = state.messages
        said = last["content"]
        if last["role"] != "user":
            messages = [*before, last, {"role": "user", "content": question.text}]
        elif isinstance(said, str):
            messages = [*before, {**last, "content": f"{said}\n\n{question.text}"}]
        else:
            messages = [*before, {**last, "content": [*said, {"type": "text", "text": question.text}]}]
        return Conversation(tuple(messages), images=state.images, variables=UNTHINKING)


def choice_confidence(probabilities: Sequence[float]) -> float:
    """Return how far the greatest probability is above an even distribution's: 0 if equal, 1 if certain."""
    if len(probabilities) == 1:
        return 1.0
    even = 1 / len(probabilities)
    return max(0.0, (max(probabilities) - even) / (1 - even))


def score_confidence(probabilities: Sequence[float]) -> float:
    """Return how close the probabilities are to the most likely level, from 0 to 1.

    This is 1 - d / e, where d is the mean distance from the most likely level, and e an even distribution's mean distance from the middle level."""
    if len(probabilities) == 1:
        return 1.0
    count, likeliest = len(probabilities), likeliest_of(probabilities)
    distance = sum(p * abs(level - likeliest) for level, p in enumerate(probabilities))
    even = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
    return max(0.0, 1 - distance / even)


def expected_level(probabilities: Sequence[float]) -> float:
    return sum(level * p for level, p in enumerate(probabilities))


def likeliest_of(probabilities: Sequence[float]) -> int:
    """Return the index of the most likely option, or of the first one if several are equally likely."""
    return max(range(len(probabilities)), key=probabilities.__getitem__)

"""What one training conversation is: messages in the OpenAI form, the tools it lists, and what a right answer holds.

Knows no task. `Split` is carried by every builder of phrasings and values: training draws from one set of lists, the
evaluation from another, and `Lists` keeps the two side by side so that a test can compare them.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Message = dict[str, Any]


class Split(Enum):
    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Lists:
    """Two lists of the same kind: what training sees, and what only the evaluation sees."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def __getitem__(self, split: Split) -> tuple[str, ...]:
        return self.train if split is Split.TRAIN else self.held_out

    def pick(self, rng: random.Random, split: Split) -> str:
        return rng.choice(self[split])


def barred(train: str, held_out: str) -> Lists:
    """Two lists written as one string each, with bars between."""
    return Lists(tuple(train.split("|")), tuple(held_out.split("|")))


@dataclass(frozen=True)
class Expected:
    """A right answer: it holds every word of `holds` and none of `lacks`; or it is this call; or it is this object."""

    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    call: Mapping[str, Any] | None = None
    json: Mapping[str, Any] | None = None
    no_call: bool = False


@dataclass(frozen=True)
class Exchange:
    """Some messages that end with the assistant's answer, to be joined with others."""

    messages: tuple[Message, ...]
    expected: Expected = field(default_factory=Expected)


@dataclass(frozen=True)
class Conversation:
    task: str
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    expected: Expected = field(default_factory=Expected)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


def system(content: str) -> Message:
    return {"role": "system", "content": content}


def exchange(question: str, answer: str, expected: Expected | None = None) -> Exchange:
    return Exchange((user(question), assistant(answer)), expected or Expected())


def join(exchanges: Sequence[Exchange]) -> tuple[Message, ...]:
    return tuple(message for one in exchanges for message in one.messages)

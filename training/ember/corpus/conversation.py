"""A training conversation: messages in OpenAI's format, the listed tools, and the expected answer.

This module is independent of tasks. Every function that builds phrasings or values takes a `Split`: training draws from one set of lists, the
evaluation from another. `Lists` has both, so that a test can compare them.
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
    """Two lists of the same kind: one for training, and one for the evaluation only."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    def __getitem__(self, split: Split) -> tuple[str, ...]:
        return self.train if split is Split.TRAIN else self.held_out

    def pick(self, rng: random.Random, split: Split) -> str:
        return rng.choice(self[split])


def barred(train: str, held_out: str) -> Lists:
    """Make `Lists` from two strings whose entries are separated by bars."""
    return Lists(tuple(train.split("|")), tuple(held_out.split("|")))


@dataclass(frozen=True)
class Expected:
    """The expected answer: it has every word of `holds` and none of `lacks`, or equals `call` or `json`."""

    holds: tuple[str, ...] = ()
    lacks: tuple[str, ...] = ()
    call: Mapping[str, Any] | None = None
    json: Mapping[str, Any] | None = None
    no_call: bool = False


@dataclass(frozen=True)
class Exchange:
    """Messages that end with the assistant's answer; several exchanges are joined to a conversation."""

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

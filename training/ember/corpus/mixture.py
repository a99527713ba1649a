"""The share of each task in the corpus, and the joining of exchanges to conversations.

`conversations(seed)` is endless and depends only on the seed.
"""

import random
from collections.abc import Callable, Iterator

from training.ember.corpus import words
from training.ember.corpus.arithmetic import arithmetic
from training.ember.corpus.conversation import Conversation, Exchange, Split, join, system
from training.ember.corpus.extraction import extraction
from training.ember.corpus.facts import facts
from training.ember.corpus.phrasing import fill
from training.ember.corpus.recall import recall
from training.ember.corpus.repeat import repeat
from training.ember.corpus.stories import story
from training.ember.corpus.talk import PERSONA, PLAIN_SYSTEM, named, outside, talk
from training.ember.corpus.tools import tools

# Share of conversations. Questions for facts and sums have a larger share, because several of them are joined to one conversation.
MIXTURE = {
    "facts": 0.11,
    "recall": 0.16,
    "tools": 0.30,
    "json": 0.33,
    "arithmetic": 0.08,
    "talk": 0.02,
    "story": 0.005,
    "repeat": 0.005,
    "long": 0.003,
}


def conversations(seed: int) -> Iterator[Conversation]:
    rng = random.Random(seed)
    while True:
        yield conversation(rng, rng.choices(tuple(MIXTURE), tuple(MIXTURE.values()))[0])


def conversation(rng: random.Random, task: str, split: Split = Split.TRAIN) -> Conversation:
    if task == "recall":
        return recall(rng, split, small)
    if task == "tools":
        return tools(rng, split, inside)
    if task == "json":
        return extraction(rng, split)
    if task == "long":
        return _long(rng, split)
    if task == "story":
        return _with_system(rng, split, task, [story(rng, split)])
    if task == "repeat":
        return _with_system(rng, split, task, [repeat(rng, split, small)])
    if task == "talk":
        return _talk(rng, split)
    if task == "facts":
        return _with_system(rng, split, task, _several(rng, split, facts, (1, 2, 3, 4)))
    if task == "arithmetic":
        return _with_system(rng, split, task, _several(rng, split, arithmetic, (1, 3, 5, 7)))
    raise ValueError(f"There is no task {task!r}; the tasks are {', '.join(MIXTURE)}.")


def small(rng: random.Random, split: Split) -> Exchange:
    """Return any short exchange, to be placed between other exchanges of a conversation."""
    return rng.choices((facts, arithmetic, talk, outside), (4, 3, 2, 1))[0](rng, split)


def inside(rng: random.Random, split: Split) -> Exchange:
    """Return an exchange that Ember can answer without tools.

    If tools are listed, it answers other requests by "None of my tools can do that".
    """
    return rng.choices((facts, arithmetic, talk), (4, 3, 2))[0](rng, split)


def _several(
    rng: random.Random, split: Split, make: Callable[[random.Random, Split], Exchange], counts: tuple[int, ...]
) -> list[Exchange]:
    """Return one exchange for the evaluation, several for training: chats have many short exchanges."""
    return [make(rng, split) for _ in range(rng.choice(counts) if split is Split.TRAIN else 1)]


def _talk(rng: random.Random, split: Split) -> Conversation:
    if rng.random() < 0.25:
        text, asked = named(rng, split)
        before = [small(rng, split)] if rng.random() < 0.2 else []
        return Conversation("talk", (system(text), *join([*before, asked])), expected=asked.expected)
    count = rng.choice((1, 2, 3)) if split is Split.TRAIN else 1
    return _with_system(rng, split, "talk", [rng.choice((talk, outside))(rng, split) for _ in range(count)])


def _with_system(rng: random.Random, split: Split, task: str, exchanges: list[Exchange]) -> Conversation:
    messages = join(exchanges)
    # A persona changes the answer to "Who are you?", so only tasks without that question get one.
    if rng.random() < 0.2:
        text = PLAIN_SYSTEM.pick(rng, split)
        if task not in ("talk",) and rng.random() < 0.3:
            text = fill(PERSONA.pick(rng, split), {"name": words.person(rng, split)})
        messages = (system(text), *messages)
    return Conversation(task, messages, expected=exchanges[-1].expected)


def _long(rng: random.Random, split: Split) -> Conversation:
    """Return a recall conversation in which the answer is up to about 3,500 tokens back."""
    turns = int(12 * (100 / 12) ** rng.random())
    return recall(rng, split, small, turns_between=turns)

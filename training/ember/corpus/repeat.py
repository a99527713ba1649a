"""Exact repetition of words: the plainest form of the skill that recall, tools and JSON need.

Every word of these answers is copied, so a model learns copying from them several times sooner than from other tasks.
"""

import random
from collections.abc import Callable

from training.ember.corpus import words
from training.ember.corpus.conversation import Exchange, Expected, Split, barred, exchange
from training.ember.corpus.phrasing import fill

ASK = barred(
    "Repeat: {text}|Repeat after me: {text}|Say: {text}|Say exactly this: {text}|Echo {text}|Please repeat: {text}"
    "|Write this again: {text}|Copy this: {text}|Repeat the following: {text}",
    "Please say this back to me: {text}|Can you repeat this: {text}|Write exactly: {text}",
)
_KINDS = ("word", "word", "proper", "number", "code", "person", "city", "time", "colour", "full_name", "email", "task")


def repeat(rng: random.Random, split: Split, other: Callable[[random.Random, Split], Exchange]) -> Exchange:
    """Return a request to repeat some values or a user's whole sentence, even if that is a question."""
    if rng.random() < 0.4:
        text = str(other(rng, split).messages[0]["content"])
    else:
        separator = rng.choice((" ", " ", ", ", "; "))
        text = separator.join(words.value(rng, rng.choice(_KINDS), split) for _ in range(rng.choice((1, 2, 4, 6, 8))))
    return exchange(fill(ASK.pick(rng, split), {"text": text}), text, Expected(holds=(text,)))

"""Drafters by the words that a site's file and `pilotlight serve --speculate` have for them."""

from collections.abc import Callable

from engine.drafting.drafter import Drafter
from engine.drafting.grammar import GrammarDrafter
from engine.drafting.speculator import Speculator
from engine.drafting.suffix import SuffixDrafter
from engine.errors import CheckpointError

_DRAFTERS: dict[str, Callable[[], Drafter]] = {"grammar": GrammarDrafter, "suffix": SuffixDrafter}
AUTO = tuple(_DRAFTERS)  # in the order in which they are asked: what is forced first


def make_speculator(words: str, vocab_size: int, is_overlapped: bool = False) -> Speculator | None:
    """Return the speculation that `words` ask for: auto, off, or drafters in the order in which they are to be asked. `is_overlapped`: steps are.
    Raises CheckpointError."""
    if words == "off":
        return None
    names = AUTO if words == "auto" else tuple(words.split(","))
    for name in names:
        if name not in _DRAFTERS:
            raise CheckpointError(f"speculate: {name!r} is no drafter; say auto, off, or some of {', '.join(AUTO)}")
    return Speculator([_DRAFTERS[name]() for name in names], vocab_size, is_overlapped=is_overlapped)

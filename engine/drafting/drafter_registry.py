"""Drafters by their names in a site's file and in `pilotlight serve --speculate`."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter import Draft, Drafter
from pilotlight.engine.drafting.model_drafter import ModelDrafter
from pilotlight.engine.drafting.speculator import Speculator
from pilotlight.engine.drafting.suffix import SuffixDrafter

_PRIOR = 0.9
_LIKELY, _PRIOR_LIKELY = "grammar but for white space", 0.8  # kind and prior of a token that white space may precede


class GrammarDrafter:
    """Drafts text that a sequence's grammar forces: names of properties, brackets, ends of choices.

    It also drafts tokens that are forced except for white space before them. Forced text is only drafted, not output: the model still chooses among
    the tokens that can spell it.
    """

    name = "grammar"

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        if sequence.matcher is None:
            return None
        found, is_forced = sequence.matcher.foreseen(ahead, most)
        if not found:
            return None
        return Draft(found, self.name, _PRIOR) if is_forced else Draft(found, _LIKELY, _PRIOR_LIKELY)

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: a sequence's state is in its matcher."""


_DRAFTERS: dict[str, Callable[[], Drafter]] = {"grammar": GrammarDrafter, "suffix": SuffixDrafter}
AUTO = tuple(_DRAFTERS)  # in order of preference: forced tokens first
_WORDS = f"auto, off, or a comma-separated list of {', '.join(AUTO)} and at most one of draft:DIRECTORY, eagle3:DIRECTORY, mtp"


class DraftWords(NamedTuple):
    """The requested drafters."""

    names: tuple[str, ...] = ()  # drafters without weights, in order of preference
    # "draft", "eagle3" or "mtp": a drafter with weights, used for sequences for which `names` have no draft
    model: str | None = None
    directory: Path | None = None  # directory of that drafter's weights; None if the model's checkpoint has them

    @classmethod
    def read(cls, words: str) -> "DraftWords":
        """Parse the value of a site's `speculate` setting. Raises CheckpointError."""
        if words == "off":
            return cls()
        names: list[str] = []
        model, directory = None, None
        for word in AUTO if words == "auto" else words.split(","):
            kind, colon, place = word.partition(":")
            if word in _DRAFTERS and word not in names:
                names.append(word)
            elif model is None and (word == "mtp" or (kind in ("draft", "eagle3") and place)):
                model, directory = kind, Path(place) if colon else None
            else:
                raise CheckpointError(
                    f"speculate: {word!r} is not a drafter, or may not be added to the others; use {_WORDS}"
                )
        return cls(tuple(names), model, directory)

    def speculator(
        self, vocab_size: int, is_overlapped: bool = False, model: ModelDrafter | None = None
    ) -> Speculator | None:
        """Return a speculator with these drafters, or None without any.

        `is_overlapped`: a step is launched before the previous one ends. `model`: the drafter with weights.
        """
        if not self.names and model is None:
            return None
        return Speculator(
            [_DRAFTERS[name]() for name in self.names], vocab_size, is_overlapped=is_overlapped, model=model
        )

"""The drafters that a configuration names."""

from pathlib import Path

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.drafting.drafter_registry import DraftWords


def names(words: str) -> list[str]:
    made = DraftWords.read(words).speculator(100)
    return [] if made is None else [drafter.name for drafter in made.drafters]


def test_words_name_drafters_in_the_order_in_which_they_are_asked() -> None:
    assert names("off") == []
    assert names("auto") == ["grammar", "suffix"]
    assert names("suffix,grammar") == ["suffix", "grammar"]
    assert names("suffix") == ["suffix"]


def test_one_drafter_may_have_weights() -> None:
    assert DraftWords.read("suffix,draft:/models/small") == (("suffix",), "draft", Path("/models/small"))
    assert DraftWords.read("eagle3:/models/head") == ((), "eagle3", Path("/models/head"))
    assert DraftWords.read("grammar,suffix,mtp") == (("grammar", "suffix"), "mtp", None)


@pytest.mark.parametrize(
    "words", ["", "fast", "suffix,", "auto,suffix", "draft:", "eagle3", "mtp:/x", "mtp,draft:/x", "suffix,suffix"]
)
def test_others_are_refused_by_name(words: str) -> None:
    with pytest.raises(
        CheckpointError,
        match="is not a drafter, or may not be added to the others; use auto, off, or a comma-separated list of grammar, suffix",
    ):
        DraftWords.read(words)

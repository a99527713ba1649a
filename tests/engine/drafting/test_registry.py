"""Drafters by their words."""

import pytest

from engine.drafting.registry import make_speculator
from engine.errors import CheckpointError


def names(words: str) -> list[str]:
    made = make_speculator(words, 100)
    return [] if made is None else [drafter.name for drafter in made._drafters]


def test_words_name_drafters_in_the_order_in_which_they_are_asked() -> None:
    assert names("off") == []
    assert names("auto") == ["grammar", "suffix"]
    assert names("suffix,grammar") == ["suffix", "grammar"]
    assert names("suffix") == ["suffix"]


@pytest.mark.parametrize("words", ["", "fast", "suffix,", "auto,suffix", "eagle3:/models/x"])
def test_others_are_refused_by_name(words: str) -> None:
    with pytest.raises(CheckpointError, match="is no drafter; say auto, off, or some of grammar, suffix"):
        make_speculator(words, 100)

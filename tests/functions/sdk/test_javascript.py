"""Functions that use names of JavaScript's standard library."""

import pytest

from js import TextDecoder


def test_a_decoder_passes_over_what_is_no_text_only_where_it_may() -> None:
    broken = b"a\xffb"
    assert TextDecoder.new().decode(broken) == TextDecoder.new("utf-8", {"fatal": False}).decode(broken) == "a\ufffdb"
    for strict in (TextDecoder.new("utf-8", {"fatal": True}), TextDecoder.new(fatal=True)):
        assert strict.decode("ä".encode()) == "ä"
        with pytest.raises(ValueError, match="invalid start byte"):
            strict.decode(broken)

"""Sets of prefix digests as bytes: equal sets give equal bytes, only changes are sent, and a set as large as the limit is accepted."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.hop.prefixes import (
    MAX_PROMPT_PREFIXES,
    MAX_PUBLISHED,
    SHORT_BYTES,
    apply_changes,
    changed_prefixes,
    decode_prefixes,
    decode_prompt_prefixes,
    encode_prefixes,
    encode_prompt_prefixes,
    short_digest,
)

DIGESTS = st.sets(st.integers(0, 2**32 - 1), max_size=20)


@given(DIGESTS, DIGESTS)
def test_a_digest_is_what_its_changes_make_of_the_one_before(before: set[int], after: set[int]) -> None:
    old, new = encode_prefixes(before), encode_prefixes(after)
    assert decode_prefixes(new) == after
    assert len(new) == SHORT_BYTES * len(after)
    came, gone = changed_prefixes(old, new)
    assert (decode_prefixes(came), decode_prefixes(gone)) == (after - before, before - after)
    assert apply_changes(frozenset(before), came, gone) == after


def test_digests_are_written_sorted_and_with_their_highest_byte_first() -> None:
    assert encode_prefixes([258, 1]) == b"\0\0\0\1\0\0\1\2"
    assert short_digest(b"\0\0\1\2rest") == 258


def test_as_many_are_published_as_may_be_and_no_more_by_whatever_way() -> None:
    whole = encode_prefixes(range(MAX_PUBLISHED))
    held = decode_prefixes(whole)
    assert len(held) == MAX_PUBLISHED
    one = encode_prefixes([MAX_PUBLISHED])
    assert len(apply_changes(held, one, encode_prefixes([0]))) == MAX_PUBLISHED
    assert apply_changes(frozenset(), whole, one) == held
    for refused in (lambda: decode_prefixes(whole + one), lambda: apply_changes(held, one, b"")):
        with pytest.raises(ValueError, match=f"at most {MAX_PUBLISHED} entries"):
            refused()
    for cut in (1, 2, 3):
        with pytest.raises(ValueError, match="at most"):
            decode_prefixes(whole[:-cut])


def test_a_prompts_prefixes_come_back_and_the_first_are_kept_where_there_are_too_many() -> None:
    named = tuple((i, 2**32 - 1 - i) for i in range(MAX_PROMPT_PREFIXES))
    assert decode_prompt_prefixes(encode_prompt_prefixes(named)) == named
    assert decode_prompt_prefixes(encode_prompt_prefixes((*named, (99, 99)))) == named
    assert decode_prompt_prefixes(encode_prompt_prefixes([(7, 2**40)])) == ((7, 2**32 - 1),)
    assert decode_prompt_prefixes("") == ()
    assert len(encode_prompt_prefixes(named)) == 512


@pytest.mark.parametrize(
    "value",
    ["AAAA", "AAAAAAAAAA=", "AAAAAAAAAAA\n=", "é", base64.b64encode(struct.pack(">2I", 1, 1) * (MAX_PROMPT_PREFIXES + 1)).decode()],
)  # fmt: skip
def test_what_no_router_says_of_a_prompt_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_prompt_prefixes(value)

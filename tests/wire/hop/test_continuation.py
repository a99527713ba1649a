"""The resume points and delivery headers between site and router round-trip, and any other form is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.hop.continuation import (
    DRAIN_NOTICE,
    MAX_CHOICES,
    MAX_DELIVERED_BYTES,
    AnswerName,
    ContinuationError,
    Delivered,
    Delivery,
    ResumePoint,
    decode_answer,
    decode_delivery,
    encode_answer,
    encode_delivery,
    is_drain_notice,
    strip_resume_point,
    with_resume_point,
)
from pilotlight.wire.sse import DONE, HEARTBEAT, EventDecoder, encode_event

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)
FINISHES = st.sampled_from([None, "stop", "length", "tool_calls"])
RESUME_POINTS = st.builds(ResumePoint, st.integers(0, 1023), TOKENS, FINISHES, st.integers(0, 2**40))
DATA = st.lists(st.binary(max_size=20).filter(lambda data: b"\r" not in data), min_size=1, max_size=4)


@given(DATA, RESUME_POINTS)
def test_a_mark_goes_with_the_last_event_and_leaves_no_trace(data: list[bytes], mark: ResumePoint) -> None:
    plain = b"".join(encode_event(item) for item in data)
    events = EventDecoder().feed(with_resume_point(plain, mark))
    parts = [strip_resume_point(event.raw) for event in events]
    assert b"".join(raw for raw, _ in parts) == plain
    assert [found for _, found in parts] == [None] * (len(parts) - 1) + [mark]
    assert [event.data for event in events] == [event.data for event in EventDecoder().feed(plain)]


@given(st.integers(0, 2**63 - 1), st.integers(0, 10**11), st.binary(min_size=1, max_size=9))
def test_an_answers_name_is_read_as_it_was_written(seed: int, created: int, delivery: bytes) -> None:
    name = AnswerName(seed, created, AnswerName.fresh().nonce)
    assert decode_answer(encode_answer(name)) == (name, 0)
    assert decode_answer(encode_answer(name, delivery)) == (name, len(delivery))


@given(st.lists(st.builds(Delivered, TOKENS, FINISHES), max_size=4).map(tuple), st.integers(0, 9))
def test_a_delivery_is_read_as_it_was_written(choices: tuple[Delivered, ...], cached_tokens: int) -> None:
    delivery = Delivery(choices, cached_tokens)
    assert decode_delivery(encode_delivery(delivery)) == delivery


@given(st.binary(max_size=60))
def test_any_bytes_are_a_mark_or_none_or_refused(noise: bytes) -> None:
    for raw in (noise, b":pl [" + noise + b"\ndata: x\n\n"):
        try:
            event, mark = strip_resume_point(raw)
        except ContinuationError:
            continue
        assert mark is not None or event == raw


@pytest.mark.parametrize(
    "value",
    ["", "1.2", "1.2.xyz", "-1.2." + "0" * 24, f"{2**63}.2." + "0" * 24, "1.2." + "0" * 24 + ".99999999", "1.2." + "0" * 24 + "."],
)  # fmt: skip
def test_a_malformed_name_is_refused(value: str) -> None:
    with pytest.raises(ContinuationError, match=r"SEED\.CREATED\.NONCE"):
        decode_answer(value)


@pytest.mark.parametrize(
    "data", [b"", b"[", b"{}", b"[[[[-1]]]]", b"[[[[2147483648]]]]", b'[[[[1],"abort"]]]', b"[[],-1]"]
)
def test_a_malformed_delivery_is_refused(data: bytes) -> None:
    with pytest.raises(ContinuationError, match="cannot be read"):
        decode_delivery(data)


def test_other_comments_are_neither_marks_nor_notices() -> None:
    for raw in (HEARTBEAT, b": pl [0,[1]]\n\n", b":please\n\n", encode_event(DONE)):
        assert strip_resume_point(raw) == (raw, None)
        assert not is_drain_notice(raw)
    assert is_drain_notice(DRAIN_NOTICE)


def test_numbers_have_a_largest_value_that_is_read() -> None:
    nonce = "0123456789abcdef01234567"
    read = decode_answer(f"{2**63 - 1}.{10**12 - 1}.{nonce}.{MAX_DELIVERED_BYTES}")
    assert read == (AnswerName(2**63 - 1, 10**12 - 1, nonce), MAX_DELIVERED_BYTES)
    for value in (
        f"1.2.{nonce}.{MAX_DELIVERED_BYTES + 1}",
        f"1.{10**12}.{nonce}",
        f"1.2.{nonce}0",
        f"1.2.{nonce}.1\n",
        f" 1.2.{nonce}",
    ):
        with pytest.raises(ContinuationError):
            decode_answer(value)
    last = ResumePoint(MAX_CHOICES - 1, (2**31 - 1,))
    assert strip_resume_point(with_resume_point(b"data: x\n\n", last))[1] == last
    assert decode_delivery(encode_delivery(Delivery((Delivered(),) * MAX_CHOICES))).choices[-1] == Delivered()
    for raw in (
        b":pl [%d,[1]]\ndata: x\n\n" % MAX_CHOICES,
        b":pl [0,[%d]]\ndata: x\n\n" % 2**31,
        b":pl [0,[1],null,-1]\n\n",
        b":pl [0,[1]]\n:pl [0,[2]]\ndata: x\n\n",
    ):
        with pytest.raises(ContinuationError):
            strip_resume_point(raw)
    with pytest.raises(ContinuationError):
        decode_delivery(encode_delivery(Delivery((Delivered(),) * (MAX_CHOICES + 1))))


def test_parts_of_an_answer_have_names_of_their_own_at_every_site() -> None:
    name = AnswerName(1, 2, "0123456789abcdef01234567")
    ids = {name.item_id(choice, position) for choice in range(3) for position in range(20)}
    assert len(ids) == 60
    assert name.item_id(0x12, 0xABC) == "0123456789abcdef01" + "012" + "abc"
    assert {len(each) for each in ids} == {24}
    assert AnswerName.fresh().seed != AnswerName.fresh().seed
    assert [Delivered().has_started, Delivered((1,)).has_started, Delivered((), "stop").has_started] == [
        False,
        True,
        True,
    ]

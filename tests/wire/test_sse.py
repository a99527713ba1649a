"""The SSE codec round-trips through any chunking, and survives hostile input."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.sse import DONE, HEARTBEAT, EventDecoder, SSEError, encode_event, has_data, parse_event

# The encoder writes line ends in data as LF, so CR and CR LF are decoded as LF.
payloads = st.binary(max_size=60).map(lambda data: data.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))


def in_chunks(stream: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(stream), *(cut % (len(stream) + 1) for cut in cuts)})
    return [stream[start:end] for start, end in itertools.pairwise(edges)]


@given(st.lists(st.tuples(payloads, st.sampled_from([None, "token"])), max_size=6), st.lists(st.integers(0, 10**6)))
def test_events_survive_any_chunking(events: list[tuple[bytes, str | None]], cuts: list[int]) -> None:
    stream = b"".join(encode_event(data, name) for data, name in events)
    decoder = EventDecoder()
    decoded = [event for chunk in in_chunks(stream, cuts) for event in decoder.feed(chunk)]
    assert [event.data for event in decoded] == [data for data, _ in events]
    assert [event.name for event in decoded] == [None if name is None else name.encode() for _, name in events]
    assert b"".join(event.raw for event in decoded) == stream
    assert decoder.pending_bytes == 0


@given(st.lists(st.binary(max_size=40), max_size=12))
def test_arbitrary_bytes_lose_nothing_and_never_crash(chunks: list[bytes]) -> None:
    decoder = EventDecoder()
    raw = b"".join(event.raw for chunk in chunks for event in decoder.feed(chunk))
    stream = b"".join(chunks)
    if len(stream) >= 3:
        stream = stream.removeprefix(b"\xef\xbb\xbf")
    assert len(raw) + decoder.pending_bytes == len(stream)
    assert stream.startswith(raw)


@given(st.sampled_from([b"\n", b"\r\n", b"\r"]), st.lists(st.integers(0, 10**6)))
def test_every_line_ending_of_the_standard_is_understood(newline: bytes, cuts: list[int]) -> None:
    stream = newline.join([b": hello", b"id: 7", b"event: token", b"data: a", b"data:b", b"", b"data: c", b"", b""])
    decoder = EventDecoder()
    decoded = [event for chunk in in_chunks(stream, cuts) for event in decoder.feed(chunk)]
    decoded += decoder.feed(b"\n")  # after a final CR the decoder waits for one more byte, as LF could follow
    found = [(event.name, event.data) for event in decoded if event.data is not None]
    assert found == [(b"token", b"a\nb"), (None, b"c")]


@given(st.lists(st.sampled_from([b"data", b":", b"\n", b"\r", b"\r\n", b" ", b"x", b"d"]), max_size=10).map(b"".join))
def test_what_carries_data_is_known_without_reading_it(raw: bytes) -> None:
    assert has_data(raw + b"\n\n") == (parse_event(raw + b"\n\n").data is not None)


def test_a_byte_order_mark_is_skipped() -> None:
    assert EventDecoder().feed(b"\xef\xbb\xbfdata: x\n\n")[0].data == b"x"


def test_heartbeats_and_the_end_are_recognised() -> None:
    comment, end = EventDecoder().feed(HEARTBEAT + encode_event(DONE))
    assert comment.data is None
    assert end.is_done


@pytest.mark.parametrize("end", [b"\n", b"\r", b"\r\n"])
def test_every_line_end_in_data_begins_a_data_line(end: bytes) -> None:
    assert encode_event(b"a" + end + b"event: b") == b"data: a\ndata: event: b\n\n"


@given(
    st.lists(
        st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n", b"data: a", b":", b"\xef\xbb\xbf", b"\xef"]), max_size=12
    ),
    st.data(),
)
def test_what_is_read_does_not_depend_on_the_pieces_in_which_it_comes(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=6))
    whole, pieces = EventDecoder(), EventDecoder()
    expected = whole.feed(stream)
    assert [event for chunk in in_chunks(stream, cuts) for event in pieces.feed(chunk)] == expected
    assert pieces.pending_bytes == whole.pending_bytes


@pytest.mark.parametrize("size", [1, 3, 100])
def test_an_event_may_have_as_many_bytes_as_the_limit_until_its_end_comes(size: int) -> None:
    decoder, event = EventDecoder(max_event_bytes=100), b"data: " + b"x" * 94
    assert [decoder.feed(chunk) for chunk in in_chunks(event, [*range(0, 100, size)])].count([]) == -(-100 // size)
    (found,) = decoder.feed(b"\n\n")
    assert found.raw == event + b"\n\n"
    decoder.feed(event)
    with pytest.raises(SSEError):
        decoder.feed(b"x")


def test_fields_are_read_as_the_standard_says() -> None:
    read = parse_event(b"id: 1\nevent:  b\nevent: c\ndata\ndatum: x\ndata:  y\nretry: 1\n: data: z\n\n")
    assert read[:2] == (b"\n y", b"c")
    assert parse_event(b"id:\n\n")[:2] == (None, None)

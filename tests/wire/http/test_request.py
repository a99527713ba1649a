"""Requests read from bytes: whatever pieces they come in, what is refused, which one may become a WebSocket."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.http.request import (
    MAX_PIPELINED,
    Begun,
    BodyPart,
    Ended,
    Refused,
    RequestEvent,
    RequestReader,
    WebSocketAsked,
)

POST = b"POST /v1/a%20b?c=d HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nonetwo"
CHUNKED = b"PUT / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\nlast: 1\r\n\r\n"
SOCKET = b"GET /s HTTP/1.1\r\nhost: x\r\nconnection: Upgrade\r\nupgrade: WebSocket\r\n\r\n"


def read(data: bytes, *, at: tuple[int, ...] = (), num_open: int = 0) -> list[RequestEvent]:
    reader = RequestReader(64 << 10, 128)
    cuts = [0, *sorted(cut % (len(data) + 1) for cut in at), len(data)]
    return [
        event for start, end in itertools.pairwise(cuts) for event in reader.feed(data[start:end], num_open) if data
    ]


@given(st.lists(st.integers(0, 400), max_size=5).map(tuple))
def test_a_request_is_the_same_in_whatever_pieces_it_comes(at: tuple[int, ...]) -> None:
    events = read(POST + CHUNKED, at=at)
    heads = [event.head for event in events if isinstance(event, Begun)]
    assert [(head.method, head.url) for head in heads] == [(b"POST", b"/v1/a%20b?c=d"), (b"PUT", b"/")]
    assert heads[0].headers == [(b"host", b"x"), (b"content-length", b"6")]
    assert b"".join(event.data for event in events if isinstance(event, BodyPart)) == b"onetwoonetwo"
    assert len([event for event in events if isinstance(event, Ended)]) == 2
    assert not any(isinstance(event, Refused) for event in events)


def test_a_scope_tells_of_the_request_and_of_its_connection() -> None:
    (begun, *_) = read(POST)
    assert isinstance(begun, Begun)
    scope = begun.head.scope({"scheme": "https"})
    assert (scope["method"], scope["path"], scope["raw_path"]) == ("POST", "/v1/a b", b"/v1/a%20b")
    assert (scope["query_string"], scope["scheme"]) == (b"c=d", "https")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_websocket_is_asked_for_in_whatever_pieces(size: int) -> None:
    reader, events = RequestReader(64 << 10, 128), list[RequestEvent]()
    for start in range(0, len(SOCKET), size):
        events += reader.feed(SOCKET[start : start + size], 0)
    (asked,) = events
    assert isinstance(asked, WebSocketAsked)
    assert asked.head.url == b"/s"


def test_what_comes_behind_a_handshake_is_kept_and_only_a_request_alone_becomes_a_websocket() -> None:
    (asked,) = read(SOCKET + b"\x81\0")
    assert isinstance(asked, WebSocketAsked)
    assert asked.rest == b"\x81\0"
    for events in (read(SOCKET, num_open=1), read(POST + SOCKET)):
        assert not any(isinstance(event, WebSocketAsked | Refused) for event in events)
        assert isinstance(events[-1], Ended)


def test_what_is_refused_comes_behind_what_was_read() -> None:
    events = read(POST + b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(events[-1], Refused)
    assert "host" in events[-1].error.message
    assert isinstance(events[-2], Ended)


def test_requests_ahead_of_their_answers_are_bounded() -> None:
    events = read(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 2))
    assert len([event for event in events if isinstance(event, Begun)]) == MAX_PIPELINED + 1
    assert isinstance(events[-1], Refused)

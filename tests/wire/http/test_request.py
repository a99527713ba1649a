"""The parser of requests: bytes that are split anywhere, requests that are refused, and upgrades to WebSockets."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.wire.errors import ApiError
from pilotlight.wire.http.request import (
    MAX_PIPELINED,
    BodyPart,
    Ended,
    Refused,
    RequestEvent,
    RequestHead,
    RequestReader,
    RequestStarted,
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
    heads = [event.head for event in events if isinstance(event, RequestStarted)]
    assert [(head.method, head.url) for head in heads] == [(b"POST", b"/v1/a%20b?c=d"), (b"PUT", b"/")]
    assert heads[0].headers == [(b"host", b"x"), (b"content-length", b"6")]
    assert heads[1].headers == [(b"host", b"x"), (b"transfer-encoding", b"chunked")], "trailers are dropped"
    assert b"".join(event.data for event in events if isinstance(event, BodyPart)) == b"onetwoonetwo"
    assert len([event for event in events if isinstance(event, Ended)]) == 2
    assert not any(isinstance(event, Refused) for event in events)


def test_a_scope_describes_the_request_and_its_connection() -> None:
    (started, *_) = read(POST)
    assert isinstance(started, RequestStarted)
    scope = started.head.scope({"scheme": "https"})
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


def test_bytes_after_a_handshake_are_kept_and_only_a_request_alone_becomes_a_websocket() -> None:
    (asked,) = read(SOCKET + b"\x81\0")
    assert isinstance(asked, WebSocketAsked)
    assert asked.rest == b"\x81\0"
    for events in (read(SOCKET, num_open=1), read(POST + SOCKET)):
        assert not any(isinstance(event, WebSocketAsked | Refused) for event in events)
        assert isinstance(events[-1], Ended)


def test_a_refusal_follows_the_bytes_that_were_read() -> None:
    events = read(POST + b"GET / HTTP/1.1\r\n\r\n")
    assert isinstance(events[-1], Refused)
    assert "host" in events[-1].error.message
    assert isinstance(events[-2], Ended)


def test_requests_ahead_of_their_answers_are_bounded() -> None:
    events = read(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * (MAX_PIPELINED + 2))
    assert len([event for event in events if isinstance(event, RequestStarted)]) == MAX_PIPELINED + 1
    assert isinstance(events[-1], Refused)


HOST = (b"host", b"x")


@pytest.mark.parametrize(
    ("version", "headers", "keep_alive", "expects"),
    [
        ("1.1", [HOST], True, False),
        ("1.1", [HOST, (b"connection", b"close")], False, False),
        ("1.1", [HOST, (b"connection", b"Keep-Alive , CLOSE")], False, False),
        ("1.1", [HOST, (b"connection", b"close"), (b"connection", b"keep-alive")], False, False),
        ("1.1", [HOST, (b"connection", b"upgrade")], True, False),
        ("1.1", [HOST, (b"expect", b"100-Continue")], True, True),
        ("1.1", [HOST, (b"expect", b"200-ok")], True, False),
        ("1.1", [HOST, (b"transfer-encoding", b"Chunked")], True, False),
        ("1.0", [], False, False),
        ("1.0", [HOST, (b"connection", b"keep-alive")], True, False),
        ("1.0", [HOST, (b"connection", b"keep-alive, close")], False, False),
        ("1.0", [HOST, (b"expect", b"100-continue")], False, False),
    ],
)
def test_a_head_says_whether_another_request_follows_and_whether_its_client_waits(
    version: str, headers: list[tuple[bytes, bytes]], keep_alive: bool, expects: bool
) -> None:
    head = RequestHead.of(b"GET", b"/", version, headers)
    assert (head.keep_alive, head.expects) == (keep_alive, expects)


@pytest.mark.parametrize(
    ("version", "headers", "word"),
    [
        ("0.9", [HOST], "http_version_not_supported"),
        ("2.0", [HOST], "http_version_not_supported"),
        ("1.1", [], "invalid_request"),
        ("1.1", [HOST, HOST], "invalid_request"),
        ("1.0", [HOST, HOST], "invalid_request"),
        ("1.0", [(b"transfer-encoding", b"chunked")], "invalid_request"),
        ("1.1", [HOST, (b"transfer-encoding", b"gzip, chunked")], "not_implemented"),
        ("1.1", [HOST, (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], "not_implemented"),
        ("1.1", [HOST, (b"transfer-encoding", b"")], "not_implemented"),
        ("1.1", [HOST, (b"transfer-encoding", b""), (b"transfer-encoding", b"chunked")], "not_implemented"),
    ],
)
def test_a_head_that_another_reader_may_take_otherwise_is_refused(
    version: str, headers: list[tuple[bytes, bytes]], word: str
) -> None:
    with pytest.raises(ApiError) as refused:
        RequestHead.of(b"POST", b"/", version, headers)
    assert refused.value.word == word


def test_each_request_of_a_connection_may_have_a_head_of_the_largest_size() -> None:
    reader, events = RequestReader(64, 3), list[RequestEvent]()
    for _ in range(4):
        for piece in (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"b" * 20, b"\r\n\r\n"):
            events += reader.feed(piece, 0)
    assert [type(event) for event in events] == [RequestStarted, Ended] * 4


def test_a_head_may_be_as_large_as_its_limit_and_no_larger() -> None:
    def outcome(*pieces: bytes) -> str:
        reader, events = RequestReader(64, 3), list[RequestEvent]()
        for piece in pieces:
            events += reader.feed(piece, 0)
        if not events:
            return "unfinished"
        return events[0].error.word if isinstance(events[0], Refused) else type(events[0]).__name__

    line, end = b"GET / HTTP/1.1\r\nhost: x\r\n", b"\r\n\r\n"
    longest = b"a: " + b"b" * (64 - len(b"hostxa"))  # of complete headers the limit counts names and values
    assert outcome(line + longest + end) == "RequestStarted"
    assert outcome(line + longest + b"b" + end) == "headers_too_large"
    assert outcome(line + b"a: 1\r\nb: 2" + end) == "RequestStarted"
    assert outcome(line + b"a: 1\r\nb: 2\r\nc: 3" + end) == "headers_too_large"
    assert outcome(line + b"a: 1\r\nb: 2\r\nc: 3\r\nd") == "headers_too_large"  # also before its end
    started = line + b"a: " + b"b" * (64 - len(line) - len(b"a: "))  # of an incomplete head the limit counts every byte
    for pieces in ((started,), (started[:20], started[20:])):
        assert outcome(*pieces) == "unfinished"
        assert outcome(*pieces, b"b") == "headers_too_large"
    assert outcome(line + end, started) == outcome(line + end, line + end) == "RequestStarted"


@pytest.mark.parametrize(
    ("change", "becomes_one"),
    [
        ((b"", b""), True),
        ((b"GET", b"POST"), False),
        ((b"upgrade: WebSocket", b"upgrade: h2c"), False),
        ((b"upgrade: WebSocket", b"upgrade: h2c\r\nupgrade: websocket"), False),
        ((b"upgrade: WebSocket", b"upgrade: websocket\r\nupgrade: h2c"), False),
        ((b"upgrade: WebSocket", b"upgrade: websocket, h2c"), False),
        ((b"host: x", b"host: x\r\ncontent-length: 0"), True),
        ((b"host: x", b"host: x\r\ncontent-length: 00"), False),
        ((b"host: x", b"host: x\r\ntransfer-encoding: chunked"), False),
    ],
)
def test_only_a_plain_wish_for_a_websocket_is_one(change: tuple[bytes, bytes], becomes_one: bool) -> None:
    events = read(SOCKET.replace(*change, 1))
    assert isinstance(events[0], WebSocketAsked if becomes_one else RequestStarted)
    if not becomes_one:
        assert isinstance(events[0], RequestStarted)
        assert b"upgrade" not in dict(events[0].head.headers), (
            "the application must not see an upgrade that the server ignores"
        )


def test_a_tunnel_and_other_versions_are_refused_by_name() -> None:
    for asked, word, says in (
        (b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n", "invalid_request", "target is not a URL"),
        (b"PRI * HTTP/2.0\r\n\r\n", "http_version_not_supported", "HTTP/2 is not offered here"),
        (b"GET /\r\n\r\n", "http_version_not_supported", "HTTP/1.1"),
    ):
        (refused,) = read(asked)
        assert isinstance(refused, Refused)
        assert (refused.error.word, says in refused.error.message) == (word, True)

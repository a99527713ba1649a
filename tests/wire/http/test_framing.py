"""The marks of a response's end: they depend on its head, the request's method and the client's HTTP version."""

import pytest

from pilotlight.wire.http.exchange import ResponseFraming
from pilotlight.wire.http.request import RequestHead


def framing(*, version: str = "1.1", method: bytes = b"GET", keep_alive: bool = True) -> ResponseFraming:
    return ResponseFraming(RequestHead(method, b"/", version, (), keep_alive, expects=False))


def told(
    framed: ResponseFraming, headers: tuple[tuple[bytes, bytes], ...] = (), *, whole: int | None = None, on: bool = True
) -> set[bytes]:
    lines = framed.head(200, headers, whole, on, b"").split(b"\r\n")
    return {line for line in lines if line.startswith((b"content-length", b"transfer-encoding", b"connection"))}


def test_an_answer_of_unknown_length_is_chunked_and_to_an_older_client_ends_with_its_connection() -> None:
    newer, older = framing(), framing(version="1.0")
    assert told(newer) == {b"transfer-encoding: chunked"}
    assert newer.framed(b"abc", False) + newer.framed(b"", True) == b"3\r\nabc\r\n0\r\n\r\n"
    assert told(older) == {b"connection: close"}
    assert not older.keep_alive
    assert older.framed(b"abc", True) == b"abc"


@pytest.mark.parametrize(
    ("version", "keep_alive", "on", "connection"),
    [
        ("1.1", True, True, set()), ("1.1", False, True, {b"connection: close"}), ("1.1", True, False, {b"connection: close"}),
        ("1.0", True, True, {b"connection: keep-alive"}), ("1.0", False, True, {b"connection: close"}),
    ],
)  # fmt: skip
def test_a_client_learns_whether_it_may_continue(
    version: str, keep_alive: bool, on: bool, connection: set[bytes]
) -> None:
    made = framing(version=version, keep_alive=keep_alive)
    assert told(made, whole=3, on=on) == {b"content-length: 3", *connection}


def test_what_is_longer_or_shorter_than_it_says_is_no_answer() -> None:
    for part, is_last in ((b"ab", True), (b"abcd", False), (b"abcd", True)):
        made = framing()
        told(made, ((b"Content-Length", b"3"),))
        with pytest.raises(ValueError, match="not as long"):
            made.framed(part, is_last)
    made = framing()
    told(made, ((b"content-length", b"3"),))
    assert made.framed(b"ab", False) + made.framed(b"c", True) == b"abc"


def test_a_head_request_gets_a_length_if_it_is_known_and_has_no_body() -> None:
    made = framing(method=b"HEAD")
    assert told(made, whole=0) == set()
    assert told(made, whole=3) == {b"content-length: 3"}
    assert made.framed(b"abc", True) == b""

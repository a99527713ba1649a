"""Heads that come again are the same object; what is kept of them is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.http.request_head import MAX_KEPT, MAX_KEPT_BYTES, Headers, KnownHeads, Repeated, RequestHead

HEADERS = [(b"host", b"x"), (b"authorization", b"Bearer t")]


def test_a_head_that_comes_again_is_known_and_any_other_is_not() -> None:
    heads = KnownHeads()
    known = heads.head(b"POST", b"/v1/x?a=1", "1.1", list(HEADERS), 30)
    assert heads.head(b"POST", b"/v1/x?a=1", "1.1", list(HEADERS), 30) is known
    assert (known.scope["path"], known.scope["query_string"], known.keep_alive) == ("/v1/x", b"a=1", True)
    others = [
        heads.head(b"GET", b"/v1/x?a=1", "1.1", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x", "1.1", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x?a=1", "1.0", list(HEADERS), 30),
        heads.head(b"POST", b"/v1/x?a=1", "1.1", [(b"host", b"x"), (b"authorization", b"Bearer u")], 30),
    ]
    assert len({id(head) for head in (known, *others)}) == 5


def test_what_is_kept_is_bounded_in_number_and_size() -> None:
    heads = KnownHeads()
    for i in range(2 * MAX_KEPT):
        heads.head(b"GET", b"/%d" % i, "1.1", HEADERS, 30)
    assert len(heads) == MAX_KEPT
    long = [(b"x", b"y" * MAX_KEPT_BYTES)]
    assert heads.head(b"GET", b"/", "1.1", long, MAX_KEPT_BYTES) is not heads.head(
        b"GET", b"/", "1.1", long, MAX_KEPT_BYTES
    )


def request_of(body: bytes, before: bytes = b"", after: bytes = b"") -> bytes:
    return b"POST /v1/x HTTP/1.1\r\nhost: x\r\n%sContent-Length: %d\r\n%s\r\n%s" % (before, len(body), after, body)


def repeated(raw: bytes, body: bytes, headers: Headers = HEADERS) -> Repeated | None:
    return Repeated.of(raw, RequestHead(b"POST", b"/v1/x", "1.1", headers), b"%d" % len(body))


@given(st.binary(max_size=300), st.binary(max_size=2000))
def test_a_head_that_comes_again_with_another_body_is_recognised(first: bytes, second: bytes) -> None:
    known = repeated(request_of(first, b"a: b\r\n", b"c: d\r\n"), first)
    assert known is not None
    assert known.request_in(request_of(second, b"a: b\r\n", b"c: d\r\n")) == (b"%d" % len(second), second)


@pytest.mark.parametrize(
    "read",
    [
        request_of(b"12345")[:-1],  # not whole yet
        request_of(b"12345") + b"G",  # and another one's beginning
        request_of(b"12345", b"a: b\r\n"),
        request_of(b"12345", b"", b"a: b\r\n"),
        request_of(b"12345").replace(b": 5", b": +5"),
        request_of(b"12345").replace(b": 5", b":5"),
        request_of(b"12345").replace(b": 5", b": 5 "),
        request_of(b"12345").replace(b": 5", b": \xb2"),
        request_of(b"12345").replace(b": 5", b": "),
        request_of(b"12345").replace(b": 5", b": 00000000005"),
        request_of(b"12345").replace(b"\r\n\r\n", b"\r\ntransfer-encoding: chunked\r\n\r\n"),
    ],
)
def test_any_other_bytes_are_for_the_parser(read: bytes) -> None:
    known = repeated(request_of(b"abc"), b"abc")
    assert known is not None
    assert known.request_in(read) is None


def test_heads_whose_repetition_means_something_else_are_not_remembered() -> None:
    raw = request_of(b"abc")
    assert repeated(raw, b"abc", [(b"host", b"x"), (b"connection", b"close")]) is None, "nothing comes behind it"
    assert repeated(raw + b"abc", b"abc") is None, "there was more than the request"
    assert repeated(raw.replace(b"Content-Length: 3", b"x-length: 3"), b"abc") is None
    assert repeated(request_of(b"abc", b"a: %s\r\n" % (b"y" * MAX_KEPT_BYTES)), b"abc") is None

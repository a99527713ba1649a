"""Bodies and headers of requests and responses, inside one process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.asgi import eventually
from workers import Headers, Request, Response
from workers.http.body import BodyUsedError


def stream() -> Iterator[str]:
    yield "a"
    yield "b"


def test_each_cookie_is_a_pair_of_the_items_of_headers() -> None:
    cookies = [("set-cookie", "x=1; Expires=Wed, 21 Oct 2026 07:28:00 GMT"), ("set-cookie", "y=2")]
    first = Headers([("a", "1"), ("A", "2"), *cookies])
    for pairs in (first.items(), first.entries()):
        assert Response("x", headers=pairs).headers.multi_items() == [
            ("a", "1, 2"), *cookies, ("content-type", "text/plain;charset=UTF-8"),
        ]  # fmt: skip
    assert len(first.items()) == 3
    assert first == Headers(first.items()) != Headers([("a", "1, 2"), cookies[1]])


async def test_a_body_may_be_looked_at_before_it_is_read() -> None:
    response = Response(stream())
    assert response.body is not None
    assert not response.body_used
    assert await response.text() == "ab"
    assert response.body_used


@pytest.mark.parametrize(
    "make",
    [
        lambda read: Request(read),
        lambda read: Request("http://y/", read),
        lambda read: Request("http://y/", method="PUT", body=read.body),
        lambda read: Response(read.body),
        lambda read: Response("x").replace_body(read.body),
    ],
)
async def test_a_body_that_was_read_is_no_body_of_another_request_or_response(make: Callable[[Any], Any]) -> None:
    read = Request("http://x/", method="POST", body=stream())
    await read.text()
    with pytest.raises(BodyUsedError, match="has been read already"):
        make(read)


async def test_an_error_of_a_stream_reaches_both_of_its_branches() -> None:
    async def breaks() -> AsyncIterator[str]:
        yield "a"
        raise ValueError("broken")

    response = Response(breaks())
    for each in (response.clone(), response):
        with pytest.raises(ValueError, match="broken"):
            await each.text()


async def test_a_reader_that_is_cancelled_does_not_end_the_stream_for_the_other_one() -> None:
    waits, go_on = asyncio.Event(), asyncio.Event()

    async def source() -> AsyncIterator[str]:
        async with asyncio.timeout(60):
            yield "a"
            waits.set()
            await go_on.wait()
            yield "b"

    response = Response(source())
    clone = response.clone()
    reading = asyncio.ensure_future(response.text())
    await waits.wait()
    reading.cancel()
    await asyncio.wait({reading})
    go_on.set()
    assert await clone.text() == "ab"


async def test_a_stream_whose_branches_are_both_closed_is_closed() -> None:
    ended = asyncio.Event()

    async def source() -> AsyncIterator[str]:
        try:
            yield "a"
            yield "b"
        finally:
            ended.set()

    left, right = Response(source()).body.tee()
    assert [await anext(left), await anext(left)] == [b"a", b"b"]
    await left.aclose()
    assert await anext(right) == b"a"
    assert not ended.is_set()
    await right.aclose()
    await eventually(ended.is_set)

"""Reading a request's body: its limits of size and time, and clients that leave."""

import asyncio
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from pilotlight.wire.errors import ApiError
from pilotlight.wire.http.asgi import read_body

LIMIT = 10


def scope(**headers: str) -> dict[str, Any]:
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "headers": named}


async def read(*chunks: bytes, is_whole: bool = True, within_s: float = 60.0, **headers: str) -> bytes:
    """Read a body that arrives in chunks; if it is not whole, no more arrives after them."""
    left = [*chunks]

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        chunk = left.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(left) or not is_whole}

    return await read_body(scope(**headers), receive, LIMIT, within_s)


async def test_a_body_is_its_chunks_up_to_the_limit() -> None:
    assert await read(b"0123", b"", b"456789") == b"0123456789"
    assert await read(b"") == b""


@pytest.mark.parametrize(
    ("chunks", "headers", "word"),
    [
        ((b"0123456789", b"x"), {}, "body_too_large"),
        ((), {"content_length": "11"}, "body_too_large"),
        ((), {"content_encoding": "gzip"}, "invalid_request"),
    ],
)
async def test_a_body_is_refused_before_the_rest_of_it_arrives(
    chunks: tuple[bytes, ...], headers: dict[str, str], word: str
) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(ApiError) as refused:
            await read(*chunks, is_whole=False, **headers)
    assert refused.value.word == word


async def test_a_body_that_never_ends_is_refused() -> None:
    with pytest.raises(ApiError, match=r"did not arrive within 0\.01 s; send it faster or send less") as refused:
        await read(b"0123", is_whole=False, within_s=0.01)
    assert (refused.value.word, refused.value.kind.status) == ("request_timeout", 408)


async def test_a_client_that_leaves_ends_the_reading() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        await read_body(scope(), receive, LIMIT)

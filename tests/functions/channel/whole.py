"""Reads streams."""

from collections.abc import AsyncIterator


async def whole(stream: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in stream])

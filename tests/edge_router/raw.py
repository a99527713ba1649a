"""A client on a plain socket, for requests that a correct client would not send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Wire:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def hear_all(self) -> bytes:
        """Read until the other side closes; a reset counts as the end."""
        heard = b""
        try:
            while part := await self.reader.read(1 << 16):
                heard += part
        except ConnectionError:
            pass
        return heard

    async def hear_until(self, end: bytes) -> bytes:
        return await self.reader.readuntil(end)


@asynccontextmanager
async def wire(url: str) -> AsyncIterator[Wire]:
    parts = urlsplit(url)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            yield Wire(reader, writer)
        finally:
            writer.transport.abort()


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])

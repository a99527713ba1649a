"""The site's end of a function's WebSocket, for tests."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pilotlight.functions.channel.socket_messages import Message, MessageDecoder, encode
from pilotlight.functions.host.site_functions import Response
from tests.functions.conftest import Served

UPGRADE = [("upgrade", "websocket"), ("connection", "Upgrade")]


class Socket:
    """An open WebSocket of a function: send messages, receive messages."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.response: Response | None = None
        self._found: list[Message] = []
        self._decoder = MessageDecoder(1 << 24)

    async def messages(self) -> AsyncIterator[bytes]:
        while data := await self.sent.get():
            yield data

    def send(self, message: Message) -> None:
        self.sent.put_nowait(encode(message))

    async def get(self) -> Message:
        assert self.response is not None
        assert self.response.stream is not None
        while not self._found:
            self._found += self._decoder.feed(await asyncio.wait_for(anext(self.response.stream), 60))
        return self._found.pop(0)

    async def ended(self) -> bool:
        assert self.response is not None
        assert self.response.stream is not None
        return [chunk async for chunk in self.response.stream] == []

    async def json(self) -> Any:
        message = await self.get()
        assert isinstance(message, str), message
        return json.loads(message)


async def ask(served: Served, path: str = "/", name: str = "f", headers: Any = (), **options: Any) -> Socket:
    socket = Socket()
    socket.response = await served.ask(
        path, name=name, body=socket.messages(), headers=[*UPGRADE, *headers], websocket=True, **options
    )
    return socket


@asynccontextmanager
async def opened(served: Served, path: str = "/", **options: Any) -> AsyncIterator[Socket]:
    socket = await ask(served, path, **options)
    assert socket.response is not None
    assert socket.response.status == 101
    try:
        yield socket
    finally:
        await socket.response.stream.aclose()

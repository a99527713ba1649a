"""A function's outgoing WebSockets: relays messages between the remote server and an exchange.

The egress policy (egress.py) checks and opens the connection. A side that does not read slows down the other, because at most one message is in
transit in each direction.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import aiohttp
from aiohttp import ClientWebSocketResponse, WSMessage, WSMsgType

from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.socket_messages import (
    ABNORMAL,
    NO_STATUS,
    MessageDecoder,
    MessageError,
    SocketClose,
    encode,
)

MAX_MESSAGE_BYTES = 16 << 20
PING_S = 20.0  # pause between pings; a remote server that does not answer one counts as gone
CLOSE_S = 5.0
HANDSHAKES = frozenset(
    {"sec-websocket-key", "sec-websocket-version", "sec-websocket-extensions", "sec-websocket-protocol"}
)


async def opened(
    session: aiohttp.ClientSession,
    url: str,
    headers: list[tuple[str, str]],
    messages: AsyncIterator[bytes],
    close_s: float = CLOSE_S,
) -> StreamingReply:
    """Open a WebSocket for a function.
    Raises the session's errors, and WSServerHandshakeError if the server refuses the handshake."""
    protocols = [value for name, value in headers if name.lower() == "sec-websocket-protocol"]
    socket = await session.ws_connect(
        url,
        headers=[pair for pair in headers if pair[0].lower() not in HANDSHAKES],
        protocols=[each.strip() for value in protocols for each in value.split(",") if each.strip()],
        max_msg_size=MAX_MESSAGE_BYTES,
        heartbeat=PING_S,
        autoclose=False,
    )
    chosen = [("sec-websocket-protocol", socket.protocol)] if socket.protocol else []
    return StreamingReply(
        {"status": 101, "headers": chosen, "web_socket": True, "url": url}, _relayed(socket, messages, close_s)
    )


async def _relayed(
    socket: ClientWebSocketResponse, messages: AsyncIterator[bytes], close_s: float
) -> AsyncIterator[bytes]:
    sending = asyncio.ensure_future(_sent(socket, messages))
    try:
        while True:
            message = _understood(await socket.receive(), socket)
            yield encode(message)
            if isinstance(message, SocketClose):
                break
        with suppress(TimeoutError):
            async with asyncio.timeout(close_s):
                await asyncio.shield(sending)
    finally:
        sending.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await sending
        with suppress(Exception):  # the reader has left, so the error does not matter
            async with asyncio.timeout(close_s):
                await socket.close(code=1001)


async def _sent(socket: ClientWebSocketResponse, messages: AsyncIterator[bytes]) -> None:
    decoder = MessageDecoder(MAX_MESSAGE_BYTES)
    try:
        async for chunk in messages:
            for message in decoder.feed(chunk):
                if isinstance(message, SocketClose):
                    code = 1000 if message.code in (NO_STATUS, ABNORMAL) else message.code
                    await socket.close(code=code, message=message.reason.encode())
                    return
                await (socket.send_str(message) if isinstance(message, str) else socket.send_bytes(message))
    except (Failure, MessageError, aiohttp.ClientError, OSError):
        await socket.close(code=1001)


def _understood(message: WSMessage, socket: ClientWebSocketResponse) -> str | bytes | SocketClose:
    if message.type is WSMsgType.TEXT:
        return str(message.data)
    if message.type is WSMsgType.BINARY:
        return bytes(message.data)
    if message.type is WSMsgType.CLOSE:
        return SocketClose(int(message.data or NO_STATUS), str(message.extra or ""))
    return SocketClose(socket.close_code or ABNORMAL)

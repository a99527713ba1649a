"""The WebSockets that a Durable Object has accepted: their tags, and messages as its events.

On the platform, such an object may be evicted from memory while its sockets stay open. Here it stays in memory as long as they do.
"""

import weakref
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

from pilotlight.functions.channel.socket_messages import SocketClose
from workers.sockets.websockets import CloseEvent, MessageEvent, WebSocket
from workers.trouble import print_trouble

MAX_TAGS = 10
MAX_TAG_CHARACTERS = 256


class ObjectSockets:
    def __init__(self, call: Callable[..., Awaitable[None]]) -> None:
        """`call` runs a method of the object as an event: (name, *arguments)."""
        self.auto_response: Any = None
        self._call = call
        self._tags: dict[WebSocket, tuple[str, ...]] = {}
        self.listening: weakref.WeakSet[WebSocket] = weakref.WeakSet()  # whose listeners are the object's events
        self._answered: weakref.WeakKeyDictionary[WebSocket, datetime] = weakref.WeakKeyDictionary()

    def answer_automatically(self, pair: Any) -> None:
        """Answer messages equal to `pair.request` with `pair.response`, without an event; None stops this."""
        self.auto_response = pair

    def accept(self, socket: Any, tags: Any) -> None:
        if not isinstance(socket, WebSocket):
            raise TypeError(f"acceptWebSocket takes an end of a WebSocketPair, and not {type(socket).__name__}")
        given = tuple(dict.fromkeys(str(tag) for tag in tags or ()))
        if len(given) > MAX_TAGS or any(len(tag) > MAX_TAG_CHARACTERS for tag in given):
            raise ValueError(f"a WebSocket has at most {MAX_TAGS} tags of {MAX_TAG_CHARACTERS} characters")
        socket._accept_for(self)
        self._tags[socket] = given

    def open(self, tag: Any = None) -> list[WebSocket]:
        return [socket for socket, tags in self._tags.items() if tag is None or tag in tags]

    def tags(self, socket: Any) -> list[str]:
        if socket not in self._tags:
            raise TypeError("this object has not accepted that WebSocket")
        return list(self._tags[socket])

    def answered_at(self, socket: Any) -> datetime | None:
        return self._answered.get(socket)

    def close(self) -> None:
        """Close the sockets of a discarded instance; clients that reconnect reach the next one."""
        for socket in (*self._tags, *self.listening):
            socket._discard(SocketClose(1012, "the Durable Object was reset"))
        self._tags.clear()

    async def on_event(self, socket: WebSocket, event: Any) -> None:
        if isinstance(event, MessageEvent):
            if not self._answers(socket, event.data):
                await self._told(socket, "webSocketMessage", socket, event.data)
        elif isinstance(event, CloseEvent):
            self._tags.pop(socket, None)
            await self._told(socket, "webSocketClose", socket, event.code, event.reason, event.was_clean)

    async def _told(self, socket: WebSocket, name: str, *arguments: Any) -> None:
        try:
            await self._call(name, *arguments)
        except Exception as error:
            print_trouble(name, error)

    def _answers(self, socket: WebSocket, data: Any) -> bool:
        pair = self.auto_response
        if pair is None or data != pair.request:
            return False
        self._answered[socket] = datetime.now(UTC)
        socket.send(pair.response)
        return True

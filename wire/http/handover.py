"""Connections that our own HTTP/1.1 server gives away, with what has been read of them: Hypercorn serves them to the same application.

Hypercorn and what is under it take 50 ms to import, so the first such connection does that, in a thread: nobody else's bytes wait for it. Most
processes never do. Knows no protocol.
"""

import asyncio
from typing import TYPE_CHECKING

from wire.http.exchange import Application
from wire.http.listen import KEEP_ALIVE_S
from wire.http.origins import OriginCheck, Origins

if TYPE_CHECKING:
    from wire.http.hypercorn_connection import Hypercorn

MAX_MESSAGE_BYTES = 16 << 20  # of a WebSocket's message


class Handover:
    """What a server calls with each of them."""

    def __init__(
        self,
        app: Application,
        keep_alive_s: float = KEEP_ALIVE_S,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        origins: Origins | None = None,
    ) -> None:
        self._app = app if origins is None else OriginCheck(app, origins)
        self._keep_alive_s = keep_alive_s
        self._max_message_bytes = max_message_bytes
        self._hypercorn: Hypercorn | None = None

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._hypercorn is None:
            await asyncio.to_thread(_import)
        if self._hypercorn is None:  # another connection may have been quicker
            from wire.http.hypercorn_connection import Hypercorn

            self._hypercorn = Hypercorn(self._app, self._keep_alive_s, self._max_message_bytes)
        await self._hypercorn.serve(reader, writer)

    async def stop(self) -> None:
        """Idle connections end; those at work are told to take no more."""
        if self._hypercorn is not None:
            await self._hypercorn.stop()


def _import() -> None:
    import wire.http.hypercorn_connection  # noqa: F401

"""ASGI middleware that bounds what the bodies of all requests under way may hold of a process's memory."""

from typing import Any

from wire.errors import ApiError


class BodyBudget:
    """A request that would go beyond it is refused: its `receive` raises ApiError."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.held_bytes = 0
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        held_bytes = 0

        async def counted() -> Any:
            nonlocal held_bytes
            message = await receive()
            size = len(message.get("body", b""))
            held_bytes += size
            self.held_bytes += size
            if size and self.held_bytes > self._max_bytes:
                sentence = "the bodies of other requests fill the memory: send yours again soon"
                raise ApiError("overloaded", sentence, retry_after_s=1)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self.held_bytes -= held_bytes

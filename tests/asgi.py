"""A client that calls an ASGI application directly, without a server; a test can make it disconnect."""

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message


class Exchange:
    """One open request and its response. `disconnect()` makes the application see that the client closed its connection."""

    def __init__(
        self, app: ASGIApp, method: str, path: str, body: bytes, headers: dict[str, str], *, is_whole: bool = True
    ) -> None:
        """`is_whole` is False if `send` will send more of the body."""
        pure, _, query = path.partition("?")
        self._app = app
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self.send(body, is_last=is_whole)
        self._changed = asyncio.Event()
        self.messages: list[Message] = []
        self.scope = {
            "type": "http", "http_version": "1.1", "method": method, "path": unquote(pure), "raw_path": pure.encode(), "root_path": "",
            "query_string": query.encode(), "scheme": "http", "server": ("test", 80), "client": ("test", 1),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "asgi": {"version": "3.0", "spec_version": "2.1"}, "state": {}, "extensions": {},
        }  # fmt: skip
        self.task = asyncio.ensure_future(app(self.scope, self._incoming.get, self._send))

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self._changed.set()

    def send(self, body: bytes, *, is_last: bool) -> None:
        """Send a part of the request's body."""
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": not is_last})

    def disconnect(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until(self, text: bytes) -> None:
        """Wait until the body holds `text`."""
        while text not in self.body:
            assert not self.task.done(), f"the response ended without {text!r}: {self.body!r}"
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 60)

    async def done(self) -> "Exchange":
        await asyncio.wait_for(self.task, 60)
        return self

    @property
    def is_started(self) -> bool:
        return bool(self.messages)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event: JSON, or "[DONE]"."""
        blocks = [block for block in self.body.decode().split("\n\n") if "data: " in block]
        data = [block.partition("data: ")[2] for block in blocks]
        return [item if item == "[DONE]" else json.loads(item) for item in data]

    @property
    def ids(self) -> list[int | str | None]:
        """The id of every event: an int if it is all digits, else a string; None if there is no id."""
        blocks = [block for block in self.body.decode().split("\n\n") if "data: " in block]
        ids = [block.split("\n")[0].removeprefix("id: ") if block.startswith("id: ") else None for block in blocks]
        return [int(event_id) if event_id is not None and event_id.isdigit() else event_id for event_id in ids]


def start(
    app: ASGIApp,
    path: str,
    json_body: Any = None,
    *,
    body: bytes | None = None,
    method: str | None = None,
    is_whole: bool = True,
    **headers: str,
) -> Exchange:
    raw = body if body is not None else (b"" if json_body is None else json.dumps(json_body).encode())
    has_body = body is not None or json_body is not None
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Exchange(app, method or ("POST" if has_body else "GET"), path, raw, named, is_whole=is_whole)


async def call(app: ASGIApp, path: str, json_body: Any = None, **options: Any) -> Exchange:
    return await start(app, path, json_body, **options).done()


@asynccontextmanager
async def running(app: Any) -> AsyncIterator[Any]:
    """Run the application with its lifespan."""
    async with app.router.lifespan_context(app):
        yield app


async def eventually(condition: Any, timeout_s: float = 60.0) -> None:
    """Wait until `condition()` returns, or its awaitable yields, a true value; only a failing test reaches the limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not (await found if inspect.isawaitable(found := condition()) else found):
                await asyncio.sleep(0.005)
            return
    raise AssertionError("the condition never came true")

"""The client's side of one exchange, as pure ASGI: read the body, notice when the client leaves, send an answer or a refusal.

Our own server calls back when the client leaves; Hypercorn (HTTP/2) tells of it through `receive()` only, so there somebody must always be
listening: `while_present` knows both. Knows nothing of sites.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar, cast

import orjson
from starlette.types import Message, Receive, Scope, Send

from edge_router.peek import Head, request_id_of
from wire.errors import ApiError
from wire.headers import REQUEST_ID
from wire.http.exchange import DIRECT
from wire.http.exchange import Exchange as HttpExchange
from wire.sse import encode_event

Result = TypeVar("Result")

# A client that sends a body too large must be able to read the refusal: closing on unread bytes resets the connection under it. So a bounded
# rest is read and thrown away first.
DISCARD_TIMES = 8  # of the limit
DISCARD_S = 5.0
STALL_S = 60.0  # for a client over HTTP/2 to take what waits for it


class ClientGone(Exception):
    """Nobody is listening any more."""


class Listener(Protocol):
    """To whom an answer is told: a client, or a recording."""

    head: Head
    address: str  # the client's; empty where none is there
    request_id: str
    is_streaming: bool  # an event stream has begun: a failure is an event now, no longer a status

    def cut(self, error: ApiError) -> None: ...

    async def whole(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None: ...

    async def begin_stream(self, status: int, headers: list[tuple[str, str]]) -> None: ...

    async def events(self, batch: bytes) -> None: ...

    @property
    def may_begin(self) -> bool: ...

    def begin_now(self, status: int, headers: list[tuple[str, str]], batch: bytes) -> None: ...

    @property
    def is_ready(self) -> bool: ...

    def events_now(self, batch: bytes) -> None: ...

    async def end_stream(self) -> None: ...

    async def refuse(self, error: ApiError) -> None: ...


class Downstream:
    def __init__(
        self, head: Head, address: str, receive: Receive, send: Send, direct: HttpExchange | None = None
    ) -> None:
        """`direct`: where our own server serves."""
        self.head = head
        self.address = address
        self.request_id = request_id_of(head)
        self.is_streaming = False
        self.has_answered = False
        self._receive = receive
        self._send = send
        self._direct = direct
        self._has_left = False
        self._work: asyncio.Task[Any] | None = None
        self._cut: ApiError | None = None

    @classmethod
    def of(cls, scope: Scope, receive: Receive, send: Send) -> "Downstream":
        if (direct := scope.get(DIRECT)) is not None:
            return cls.directly(direct)
        return cls(head_of(scope), str(scope["client"][0]) if scope.get("client") else "", receive, send)

    @classmethod
    def directly(cls, exchange: HttpExchange) -> "Downstream":
        """Its head is made once for all requests that repeat it. The body's length is no part of it."""
        head: Head | None = exchange.head.memo.get("head")
        if head is None:
            head = exchange.head.memo["head"] = head_of({**exchange.scope, "headers": exchange.head.headers})
        return cls(head, exchange.client, exchange.receive, cast(Send, exchange.send), exchange)

    def whole_body(self, limit: int) -> bytes | None:
        """Where all of it is here already, as nearly all are: no clock is needed. None: it is to be waited for, or refused."""
        declared = self._direct.declared_length if self._direct is not None else None
        if self._direct is None or declared is None or int(declared) > limit:
            return None
        return self._direct.whole_body()

    async def body(self, limit: int, silence_s: float, total_s: float) -> bytes:
        """Raises ApiError before more than `limit` bytes are held and for a client that pauses or takes too long, ClientGone when it leaves
        half-way."""
        if (whole := self.whole_body(limit)) is not None:
            return whole
        declared = self._declared_length
        if declared.isdigit() and int(declared) > limit:
            await self._refuse_body(int(declared), limit, silence_s)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + total_s
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            if loop.time() >= deadline:
                raise ApiError("request_timeout", f"the request's body took more than {total_s:g} s")
            message = await self._next_part(min(silence_s, deadline - loop.time()))
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > limit:
                parts.clear()
                await self._refuse_body(size, limit, silence_s)
        return b"".join(parts)

    @property
    def _declared_length(self) -> str:
        if self._direct is None:
            return self.head.header("content-length")
        return (self._direct.declared_length or b"").decode("latin-1")

    async def while_present(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` until it is done, the client leaves (ClientGone) or somebody cuts it (the ApiError given there). Nothing outlives this."""
        if self._cut is not None:
            work.close()
            raise self._cut
        if self._direct is None:
            return await self._while_listening(work)
        self._work = asyncio.current_task()
        assert self._work is not None
        self._direct.on_gone(self._leave)
        try:
            return await work
        except asyncio.CancelledError:
            if self._cut is None and not self._has_left:
                raise  # not ours
            self._work.uncancel()
            raise self._cut or ClientGone from None
        finally:
            self._direct.on_gone(None)
            self._work = None

    async def _while_listening(self, work: Coroutine[Any, Any, Result]) -> Result:
        """For a server that tells of a client's leaving to those alone who ask."""
        task: asyncio.Task[Result] = asyncio.ensure_future(work)
        self._work = task
        watch = asyncio.ensure_future(self._gone())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if self._cut is not None and task.cancelled():
                raise self._cut
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    def hold(self) -> Callable[[], None]:
        """The task that waits for the answer need not begin before what is returned is called, or the client leaves or is cut."""
        assert self._direct is not None
        self._direct.hold()
        return self._direct.go_on

    def _leave(self) -> None:
        self._has_left = True
        if self._work is not None:
            self._work.cancel()

    def cut(self, error: ApiError) -> None:
        """Ends the work from outside; the client is told `error`."""
        self._cut = error
        if self._work is not None:
            self._work.cancel()
        elif self._direct is not None:
            self._direct.go_on()

    async def whole(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.has_answered = True
        await self._start(status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def begin_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.has_answered = self.is_streaming = True
        await self._start(status, headers)

    async def events(self, batch: bytes) -> None:
        """`batch` is whole events. Our own server cuts off a client that does not read; where another one serves, it counts as gone here."""
        message = {"type": "http.response.body", "body": batch, "more_body": True}
        if self._direct is not None:
            return await self._send(message)
        try:
            async with asyncio.timeout(STALL_S):
                await self._send(message)
        except TimeoutError:
            raise ClientGone from None

    @property
    def may_begin(self) -> bool:
        """Nothing has been told, and `begin_now` may begin without keeping anybody waiting."""
        return self._direct is not None and self._direct.may_start and not self.has_answered

    def begin_now(self, status: int, headers: list[tuple[str, str]], batch: bytes) -> None:
        """A stream and its first events, in one write."""
        assert self._direct is not None
        self._direct.start(status, _raw(headers), batch)
        self.has_answered = self.is_streaming = True

    @property
    def is_ready(self) -> bool:
        """The stream has begun, and `events_now` may take more of it without keeping anybody waiting."""
        return self._direct is not None and self._direct.is_ready

    def events_now(self, batch: bytes) -> None:
        assert self._direct is not None
        self._direct.write(batch)

    async def end_stream(self) -> None:
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: ApiError) -> None:
        """In the dialect's shape: a status and a body, or inside a stream the last event."""
        body = orjson.dumps(error.body(self.head.dialect))
        if self.is_streaming:
            await self.events(encode_event(body))
            await self.end_stream()
        elif not self.has_answered:
            headers = [*error.headers(), ("content-type", "application/json"), (REQUEST_ID, self.request_id)]
            headers.append(("content-length", str(len(body))))
            await self.whole(error.status(self.head.dialect), headers, body)

    async def _start(self, status: int, headers: list[tuple[str, str]]) -> None:
        await self._send({"type": "http.response.start", "status": status, "headers": _raw(headers)})

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _next_part(self, silence_s: float) -> Message:
        try:
            async with asyncio.timeout(silence_s):
                message = await self._receive()
        except TimeoutError:
            raise ApiError("request_timeout", f"the request's body paused for more than {silence_s:g} s") from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    async def _refuse_body(self, size: int, limit: int, silence_s: float) -> None:
        waits_for_leave = self.head.header("expect").lower() == "100-continue"
        if not waits_for_leave and size <= DISCARD_TIMES * limit:
            await self._discard(DISCARD_TIMES * limit, silence_s)
        sentence = f"the body is larger than {limit / 2**20:g} MiB: shorten the prompt or raise relay.max_body_mib"
        raise ApiError("body_too_large", sentence)

    async def _discard(self, limit: int, silence_s: float) -> None:
        size, more = 0, True
        try:
            async with asyncio.timeout(min(DISCARD_S, silence_s)):
                while more and size < limit:
                    message = await self._next_part(silence_s)
                    size += len(message.get("body", b""))
                    more = message.get("more_body", False)
        except TimeoutError:
            return  # it had its chance


def _raw(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def head_of(scope: Scope) -> Head:
    headers = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]]
    query = scope.get("query_string", b"")
    target = scope.get("raw_path", scope["path"].encode()).decode("latin-1") + (
        f"?{query.decode('latin-1')}" if query else ""
    )
    scheme = "https" if scope.get("scheme") in ("https", "wss") else "http"
    return Head(scope["method"], scope["path"], target, headers, scheme=scheme)

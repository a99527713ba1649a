"""Responses over WebSockets: each message of a client is a request to the HTTP application.

Source: OpenAI's guide and reference of the WebSocket mode of /v1/responses. A client sends `response.create` with the fields of a POST, and gets the
stream's events as messages. Requests with one `stream_id` are answered in turn, others at the same time. A response that is not stored can be
continued on its connection, as long as it is among the latest ones. Steering a response while it is computed is refused.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import msgspec
import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.response_store.kept_responses import joined
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.http.asgi import response_start
from pilotlight.wire.sse import Event, EventDecoder

# limits of a connection: conversations that it keeps for their continuation, requests that are answered or wait
MOST_KEPT, KEPT_BYTES = 8, 4 << 20
MOST_OPEN, OPEN_BYTES = 32, 32 << 20
RESTARTING = 1012
_ENDS = (b"response.completed", b"response.incomplete")
_LAST = (*_ENDS, b"response.failed", b"error")
_STARTS = (b"response.created", b"response.in_progress")
_OWN_HEADERS = (b"connection", b"upgrade", b"content-length", b"content-type", b"x-request-id")

Fields = dict[str, msgspec.Raw]

_fields = msgspec.json.Decoder(Fields)
_string = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode

log = logging.getLogger("pilotlight.http")


class ResponseSockets:
    """An ASGI application for WebSockets. Await `end()` when the server stops."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], None] = lambda scope: None) -> None:
        """`app` answers the requests. `check` raises ApiError if a handshake is refused."""
        self._app = app
        self._check = check
        self._open: set[_Connection] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()  # websocket.connect
        try:
            self._check(scope)
        except ApiError as error:
            return await _refuse(send, error)
        await send({"type": "websocket.accept"})
        connection = _Connection(self._app, _as_http(scope), send)
        self._open.add(connection)
        try:
            while (message := await receive())["type"] != "websocket.disconnect":
                await connection.take(message)
        finally:
            self._open.discard(connection)
            await connection.close()

    async def end(self) -> None:
        """Close all WebSockets with a code that makes clients connect again."""
        for connection in tuple(self._open):
            await connection.send({"type": "websocket.close", "code": RESTARTING, "reason": "the server is restarting"})


class _Connection:
    def __init__(self, app: ASGIApp, scope: Scope, send: Send) -> None:
        self.send = send
        self._app = app
        self._scope = scope
        self._kept: dict[str, _Unstored] = {}  # latest responses that are not stored, by id
        self._tasks: set[asyncio.Task[None]] = set()
        self._open_bytes = 0
        self._last: dict[str | None, asyncio.Task[None]] = {}  # the last request of each stream_id
        self._gone = asyncio.Event()

    async def take(self, message: Message) -> None:
        """Start the answer to a client's message."""
        raw, lane = message.get("text") or message.get("bytes") or b"", None
        try:
            fields = _fields_in(raw)
            lane = _text(fields.pop("stream_id", None))
            if self._tasks and (len(self._tasks) >= MOST_OPEN or self._open_bytes + len(raw) > OPEN_BYTES):
                raise ApiError("quota_exceeded", "too many requests of this WebSocket wait: send the next one later")
        except ApiError as error:
            return await self.tell_error(lane, error)
        task = asyncio.create_task(self._answer(lane, fields, self._last.get(lane)), name="response of a WebSocket")
        self._tasks.add(task)
        self._last[lane] = task
        self._open_bytes += len(raw)
        task.add_done_callback(partial(self._ended, lane, len(raw)))

    async def close(self) -> None:
        """Stop the answers, whose client has left."""
        self._gone.set()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def tell(self, lane: str | None, data: bytes) -> None:
        if lane is not None:
            data = b'{"stream_id":' + orjson.dumps(lane) + b"," + data[1:]
        await self.send({"type": "websocket.send", "text": data.decode()})

    async def tell_error(self, lane: str | None, error: ApiError, **more: Any) -> None:
        dialect = Dialect.OPENAI_RESPONSES
        await self.tell_refusal(lane, error.status(dialect), error.body(dialect)["error"], **more)

    async def tell_refusal(self, lane: str | None, status: int, error: dict[str, Any], **more: Any) -> None:
        if error.get("param") == "previous_response_id" and error.get("code") == "not_found":
            # with this code clients send the whole conversation
            status, error = 400, {**error, "code": "previous_response_not_found"}
        await self.tell(lane, orjson.dumps({"type": "error", "status": status, "error": error, **more}))

    def keep(self, name: str, said: "_Unstored") -> None:
        """Remember a conversation up to the response `name`."""
        self._kept[name] = said
        while len(self._kept) > MOST_KEPT or sum(len(each.items) for each in self._kept.values()) > KEPT_BYTES:
            del self._kept[next(iter(self._kept))]

    async def _answer(self, lane: str | None, fields: Fields, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait({before})
        if self._gone.is_set():
            return
        previous = _text(fields.get("previous_response_id"))
        said = _Unstored(previous, _items_of(fields.get("input")))
        has_conversation = bytes(fields.get("conversation", b"null")) != b"null"
        is_continued = previous in self._kept and not has_conversation
        if is_continued:
            earlier = self._kept[previous or ""]
            said = _Unstored(earlier.after, joined(earlier.items, said.items))
            fields["previous_response_id"] = msgspec.Raw(_encode(earlier.after))
            fields["input"] = msgspec.Raw(b"[" + said.items + b"]")
        generates = bytes(fields.pop("generate", b"")) != b"false"
        if not generates:  # only the prompt is computed, so that it is in the cache
            fields |= {"max_output_tokens": msgspec.Raw(b"1"), "store": msgspec.Raw(b"false")}
        fields["stream"] = msgspec.Raw(b"true")
        kept = None if has_conversation else said  # a conversation is stored
        answer = _Answer(self, lane, kept, previous if is_continued else None, generates=generates)
        try:
            await self._app(dict(self._scope), self._body(_encode(fields)), answer)
            if not (answer.has_ended or self._gone.is_set()):
                raise ApiError("upstream_lost", "the response broke off before its end: send the request again")
        except ClientDisconnect:
            return
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a request of a WebSocket failed")
                error = ApiError("internal_error", "the server failed; its log has the reason")
            await self.tell_error(lane, error)

    def _ended(self, lane: str | None, num_bytes: int, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._open_bytes -= num_bytes
        if self._last[lane] is task:
            del self._last[lane]

    def _body(self, body: bytes) -> Receive:
        parts = [body]

        async def receive() -> Message:
            if parts:
                return {"type": "http.request", "body": parts.pop(), "more_body": False}
            await self._gone.wait()
            return {"type": "http.disconnect"}

        return receive


class _Unstored(NamedTuple):
    """A conversation up to a response that is not stored."""

    after: str | None  # the stored response that it continues
    items: bytes  # its items after that


class _Answer:
    """An ASGI `send` that turns one response's stream, or its refusal, into messages."""

    def __init__(
        self,
        connection: _Connection,
        lane: str | None,
        said: _Unstored | None,
        previous: str | None,
        *,
        generates: bool,
    ) -> None:
        """Prepare the answer to a conversation, which the connection keeps if `said` is not None.

        `previous` is the response of this connection that it continues."""
        self._connection = connection
        self._lane = lane
        self._said = said
        self._previous = previous
        self._generates = generates
        self.has_ended = False  # the client has its last message
        self._status = 200
        self._decoder: EventDecoder | None = None  # None for a refusal
        self._refusal = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            if any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            ):
                self._decoder = EventDecoder()
        elif self._decoder is None:
            self._refusal += message.get("body", b"")
            if not message.get("more_body", False):
                self.has_ended = True
                error = orjson.loads(bytes(self._refusal))["error"]
                await self._connection.tell_refusal(self._lane, self._status, error)
        else:
            for event in self._decoder.feed(message.get("body", b"")):
                if event.data is not None and not event.is_done:
                    await self._tell(event, event.data)

    async def _tell(self, event: Event, data: bytes) -> None:
        self.has_ended = event.name in _LAST
        if event.name == b"error":
            told = orjson.loads(data)
            error = ApiError(told.get("code") or "internal_error", told["message"], param=told.get("param"))
            number = told.get("sequence_number")
            return await self._connection.tell_error(self._lane, error, sequence_number=number)
        if event.name in _ENDS or (event.name in _STARTS and self._previous is not None):
            data = self._patched(orjson.loads(data), is_end=event.name in _ENDS)
        elif not self._generates and event.name not in _STARTS:
            return None
        await self._connection.tell(self._lane, data)

    def _patched(self, event: dict[str, Any], *, is_end: bool) -> bytes:
        response = event["response"]
        if self._previous is not None:
            response["previous_response_id"] = self._previous
        if is_end and not self._generates:
            response |= {"status": "completed", "incomplete_details": None, "output": []}
            event |= {"type": "response.completed"}
        if is_end and self._said is not None and not response.get("store"):
            items = joined(self._said.items, orjson.dumps(response["output"])[1:-1])
            self._connection.keep(response["id"], self._said._replace(items=items))
        return orjson.dumps(event)


def _fields_in(raw: str | bytes) -> Fields:
    """Return the fields of a `response.create`. Raises ApiError."""
    try:
        fields = _fields.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ApiError("invalid_request", f"a message must be a JSON object: {error}") from None
    kind = _text(fields.pop("type", None))
    if kind != "response.create":
        raise ApiError(
            "unsupported_parameter", f"type: only 'response.create' is supported, not {str(kind)[:50]!r}", param="type"
        )
    if bytes(fields.get("background", b"")) == b"true":
        sentence = "background: is not supported over WebSockets: send the request by HTTP"
        raise ApiError("unsupported_parameter", sentence, param="background")
    return fields


def _text(value: msgspec.Raw | None) -> str | None:
    """Return the text that a field contains; None for any other value."""
    with contextlib.suppress(msgspec.MsgspecError, ValueError):
        return _string.decode(value or b"")
    return None


def _items_of(given: msgspec.Raw | None) -> bytes:
    """Return the items of an `input`, as JSON objects separated by commas."""
    raw = b"" if given is None else bytes(given)
    if raw.startswith(b'"'):
        return b'{"type":"message","role":"user","content":' + raw + b"}"
    return raw[1:-1].strip() if raw.startswith(b"[") else b""


def _as_http(scope: Scope) -> Scope:
    """Return the scope of a POST with the address, key and path of a WebSocket's handshake."""
    headers = [
        pair for pair in scope["headers"] if pair[0] not in _OWN_HEADERS and not pair[0].startswith(b"sec-websocket-")
    ]
    kept = {name: value for name, value in scope.items() if name not in ("subprotocols", "extensions")}
    scheme = "https" if scope["scheme"] == "wss" else "http"
    headers.append((b"content-type", b"application/json"))
    return {**kept, "type": "http", "method": "POST", "scheme": scheme, "headers": headers}


async def _refuse(send: Send, error: ApiError) -> None:
    body = orjson.dumps(error.body(Dialect.OPENAI_RESPONSES))
    headers = [("content-type", "application/json"), ("content-length", str(len(body))), *error.headers()]
    start = response_start(error.status(Dialect.OPENAI_RESPONSES), headers)
    await send({**start, "type": "websocket.http.response.start"})
    await send({"type": "websocket.http.response.body", "body": body})

"""Stored responses, as an ASGI application around the one that computes answers.

It implements `store`, `previous_response_id`, `background`, and reading, cancelling or deleting a response by id.

The inner application gets a body with the whole conversation and stores nothing, so its stream can continue at another site like any other. A router
runs this before its sites, and a site that serves clients directly runs it before its engine. Responses are stored on this process's disk, or in a
database that routers share (storage.py).
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import parse_qs

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pilotlight.response_store.asked_responses import AskedResponse, Fields, read_fields
from pilotlight.response_store.conversations import Conversations
from pilotlight.response_store.kept_responses import CONVERSATION, LOST, KeptResponse
from pilotlight.response_store.response_database import RetentionPolicy
from pilotlight.response_store.response_rows import LostResponse
from pilotlight.wire.credentials import Access, owner_of, tenant_of
from pilotlight.wire.errors import ApiError, Dialect
from pilotlight.wire.hop.continuation import strip_resume_point
from pilotlight.wire.http.asgi import header, query_number, read_body, response_start, send_json, until_disconnect
from pilotlight.wire.sse import HEARTBEAT, EventDecoder, encode_event, parse_event

if TYPE_CHECKING:
    from pilotlight.response_store.storage import ResponseStore

INPUT_TOKENS, COMPACT = "input_tokens", "compact"  # words that paths contain in place of a response's id
AT_ONCE_BYTES = 256 << 10  # bodies up to this size are parsed on the event loop, in a few milliseconds
HEARTBEAT_S = 10.0
MOST_LISTED = 100
SWEEP_EVERY_S = 600.0
WRITTEN_WITHIN_S = 5.0  # time to write the end of a response that is cancelled
_PATH = re.compile(
    r"^(?:/client/v4/accounts/(?P<account>[^/]+))?(?:/ai)?/v1/responses"
    rf"(?:/(?:(?P<task>{INPUT_TOKENS}|{COMPACT})|(?P<id>[^/]+)(?:/(?P<verb>cancel|input_items))?))?$"
)
_CONVERSATION_PATH = re.compile(
    r"^(?:/client/v4/accounts/(?P<account>[^/]+))?(?:/ai)?/v1/conversations"
    r"(?:/(?P<id>[^/]+)(?:/(?P<items>items)(?:/(?P<item>[^/]+))?)?)?$"
)
_LIFECYCLE = (
    b"response.created", b"response.queued", b"response.in_progress", b"response.completed", b"response.incomplete", b"response.failed",
)  # fmt: skip
_LAST = (b"event: response.completed\n", b"event: response.incomplete\n")  # last events of a stored response
_LAST_NAMES = (b"response.completed", b"response.incomplete", b"response.failed")

# Takes the number of an event. Returns this event and all later ones, and whether they include the last event of the response.
EventsAfter = Callable[[int], Awaitable[tuple[list[bytes], bool]]]

log = logging.getLogger("pilotlight.http")


# reads a body of at most the given number of bytes; raises ApiError, ClientDisconnect
ReadBody = Callable[[int], Awaitable[bytes]]


class AdmittedRequest(NamedTuple):
    owner: str  # id of its owner, as `owner_of` returns it
    read_body: ReadBody


class Door(Protocol):
    """Admission of requests: decides which are accepted, whose they are, and how their bodies are read."""

    def admitted(self, scope: Scope, receive: Receive, send: Send) -> AbstractAsyncContextManager[AdmittedRequest]:
        """Open a scope for the duration of a request. Raises ApiError if the request is not admitted."""

    def held(self, scope: Scope) -> AbstractContextManager[object]:
        """Open a scope for work that continues in the background after its request. Raises ApiError."""

    def recorded(self, scope: Scope, response: KeptResponse) -> Fields | None:
        """Let the answer to a request be recorded in a response, with resume points.
        Return what another process needs to know of the client to continue it; None if it cannot be continued."""

    def restored(self, client: Fields, response: KeptResponse, events: Sequence[bytes]) -> Scope:
        """Return a scope in which a recorded answer continues after its stored events."""


class OpenDoor:
    """Admission that accepts every request with a valid key, for an engine with its own limits."""

    def __init__(self, access: Access) -> None:
        self._access = access

    @asynccontextmanager
    async def admitted(self, scope: Scope, receive: Receive, send: Send) -> AsyncIterator[AdmittedRequest]:
        authorization = header(scope, "authorization")
        holder = self._access.holder(authorization)
        owner = owner_of(authorization, holder.account.name if holder is not None else "")
        yield AdmittedRequest(owner, partial(read_body, scope, receive))

    def held(self, scope: Scope) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def recorded(self, scope: Scope, response: KeptResponse) -> Fields | None:
        return None

    def restored(self, client: Fields, response: KeptResponse, events: Sequence[bytes]) -> Scope:
        raise AssertionError("no answer is recorded")


class ResponsesApp:
    """The ASGI application. Run `run()` as a task, and await `close()` after it."""

    def __init__(self, app: ASGIApp, door: Door, max_body_bytes: int, keeping: RetentionPolicy) -> None:
        """`app` computes the answers; it gets only requests that `door` admits."""
        self._app = app
        self._door = door
        self._max_body_bytes = max_body_bytes
        self._keeping = keeping
        self._store: ResponseStore | None = None
        self._lost = asyncio.Queue[LostResponse]()
        self._is_closed = False

    @property
    def store(self) -> "ResponseStore":
        if self._store is None:
            # imported at the first use, because SQLite takes 9 ms to import
            from pilotlight.response_store.response_file import ResponseFile
            from pilotlight.response_store.storage import ResponseStore

            kept = self._keeping
            database = kept.database or ResponseFile(kept.path, kept.max_bytes)
            self._store = ResponseStore(kept, database, lost=self._lost)
        return self._store

    @cached_property
    def conversations(self) -> Conversations:
        return Conversations(self.store)

    @property
    def is_failing(self) -> bool:
        """Tell whether the latest attempt to read or write responses failed."""
        return self._store is not None and self._store.fault is not None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except ApiError as error:
            body = orjson.dumps(error.body(Dialect.OPENAI_RESPONSES))
            await send_json(send, body, error.status(Dialect.OPENAI_RESPONSES), error.headers())
        except ClientDisconnect:
            return

    async def run(self) -> None:
        """Continue responses of ended processes and delete expired ones, until closed or cancelled."""
        while not self._is_closed:
            if self._keeping.database is not None or self._keeping.path.exists():
                with contextlib.suppress(ApiError):  # the error was logged
                    await self.store.sweep()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SWEEP_EVERY_S):
                    while True:
                        self._continue(await self._lost.get())

    async def close(self) -> None:
        """End background responses, or leave them to another process."""
        self._is_closed = True
        if self._store is not None:
            await self._store.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        found, talk = _PATH.match(scope["path"]), _CONVERSATION_PATH.match(scope["path"])
        if found is None and talk is None:
            raise ApiError("not_found", f"there is nothing at {scope['path'][:200]}")
        async with self._door.admitted(scope, receive, send) as (owner, read_body):
            if found is not None:
                tenant = tenant_of(owner, found["account"]).id
                return await self._admitted(found, tenant, read_body, scope, receive, send)
            assert talk is not None
            body = await self._converse(talk, tenant_of(owner, talk["account"]).id, read_body, scope)
            await send_json(send, body)

    async def _converse(self, found: re.Match[str], tenant: str, read_body: ReadBody, scope: Scope) -> bytes:
        """Return the answer to a request at a path of conversations. Raises ApiError."""
        talks, method, id, item = self.conversations, scope["method"], found["id"], found["item"]
        if id is not None and not id.startswith(CONVERSATION):
            raise ApiError("not_found", f"there is no conversation {id[:100]!r}: its id begins with {CONVERSATION}")
        fields: Fields = {}
        if method == "POST":
            raw, given = await self._asked(read_body)
            if raw and not isinstance(given, dict):
                raise ApiError("invalid_request", "the body must be a JSON object")
            fields = given or {}
        match method, id is not None, found["items"] is not None, item is not None:
            case "POST", False, False, False:
                return orjson.dumps(await talks.create(tenant, fields))
            case "GET", True, False, False:
                return orjson.dumps(await talks.find(tenant, id))
            case "POST", True, False, False:
                return orjson.dumps(await talks.update(tenant, id, fields))
            case "DELETE", True, False, False:
                return orjson.dumps(await talks.delete(tenant, id))
            case "GET", True, True, False:
                return await asyncio.to_thread(_listed, await talks.items(tenant, id), _query(scope))
            case "POST", True, True, False:
                return _listed(await talks.add(tenant, id, fields), {"order": "asc"})
            case "GET", True, True, True:
                return orjson.dumps(await talks.item(tenant, id, item))
            case "DELETE", True, True, True:
                return orjson.dumps(await talks.remove(tenant, id, item))
        raise ApiError("method_not_allowed", f"{scope['path'][:200]} does not take {method}")

    async def _admitted(
        self, found: re.Match[str], tenant: str, read_body: ReadBody, scope: Scope, receive: Receive, send: Send
    ) -> None:
        method, verb, task = scope["method"], found["verb"], found["task"]
        if found["id"] is None:
            if method != "POST":
                raise ApiError("method_not_allowed", f"{scope['path']} does not take {method}: POST creates a response")
            if task == COMPACT:
                sentence = (
                    "compacting conversations is not supported: request a summary as a response, and continue from it"
                )
                raise ApiError("not_implemented", sentence)
            ask = self._create if task is None else self._count
            return await ask(tenant, read_body, scope, receive, send)
        if found["id"].startswith(CONVERSATION):
            raise ApiError("not_found", f"{found['id'][:100]!r} is a conversation: see /v1/conversations")
        kept = await self.store.find(found["id"], tenant)
        query = _query(scope)
        if (method, verb) == ("GET", None) and query.get("stream") == "true":
            place = query_number(query, "starting_after", -1) + 1
            return await _send_events(self._events(kept), place, receive, send)
        if (method, verb) == ("GET", None):
            return await send_json(send, orjson.dumps(kept.fields))
        if (method, verb) == ("GET", "input_items"):
            items = await self.store.input_items(kept)
            return await send_json(send, await asyncio.to_thread(_listed, items, query))
        if (method, verb) == ("DELETE", None):
            await self.store.delete(kept)
            return await send_json(send, orjson.dumps({"id": kept.id, "object": "response", "deleted": True}))
        if (method, verb) == ("POST", "cancel"):
            return await self._cancel(kept, send)
        raise ApiError("method_not_allowed", f"{scope['path'][:200]} does not take {method}")

    async def _create(self, tenant: str, read_body: ReadBody, scope: Scope, receive: Receive, send: Send) -> None:
        raw, fields = await self._asked(read_body)
        if not isinstance(fields, dict) or not isinstance(fields.get("input"), str | list):
            # the inner application explains the error
            return await self._app(_sized(scope, raw), _replayed(raw, receive), send)
        asked = AskedResponse(fields, tenant, is_kept=self._keeping.is_on)
        if asked.conversation is not None and not asked.is_stored:
            said = "leave store out" if self._keeping.is_on else "responses are not stored here"
            raise ApiError(
                "invalid_request", f"conversation: its responses must be stored: {said}", param="conversation"
            )
        body = await self._gathered(asked)
        if asked.is_background:
            return await self._begin(asked, _sized(scope, body), body, receive, send)
        patched = _Patched(asked, send, partial(self._keep, asked) if asked.is_stored else None)
        await self._app(_sized(scope, body), _replayed(body, receive), patched)

    async def _keep(self, asked: AskedResponse, kept: KeptResponse) -> bool:
        """Store a response, and add it to its conversation if it has one. Return whether both succeeded."""
        is_kept = await self.store.keep(kept)
        if is_kept and asked.conversation is not None:
            try:
                await self.conversations.advance(kept, asked.conversation)
            except ApiError as error:
                log.warning("the response %s is not in its conversation: %s", kept.id, error.message)
                return False
        return is_kept

    async def _count(self, tenant: str, read_body: ReadBody, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the client the number of prompt tokens that a response would have."""
        raw, fields = await self._asked(read_body)
        if isinstance(fields, dict) and isinstance(fields.setdefault("input", []), str | list):
            raw = await self._gathered(AskedResponse({**fields, "background": None}, tenant))
        await self._app(_sized(scope, raw), _replayed(raw, receive), send)

    async def _asked(self, read_body: ReadBody) -> tuple[bytes, Any]:
        """Return a request's body and its fields, which are None if it is not a JSON object. Raises ApiError."""
        raw = await read_body(self._max_body_bytes)
        return raw, read_fields(raw) if len(raw) <= AT_ONCE_BYTES else await asyncio.to_thread(read_fields, raw)

    async def _gathered(self, asked: AskedResponse) -> bytes:
        """Return the body for the inner application, with the whole conversation. Raises ApiError."""
        await asked.gather(self.store)
        body = asked.inner()
        if len(body) > self._max_body_bytes:
            raise ApiError(
                "body_too_large",
                f"with the responses before it, the body is larger than {self._max_body_bytes >> 20} MiB",
            )
        return body

    async def _begin(self, asked: AskedResponse, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        """Start a background response and send it to the client; if it is refused at once, send the refusal."""
        kept = asked.queued()
        if (client := self._door.recorded(scope, kept)) is not None:
            kept.record(asked.request(client))
        recorded = _Recorded(asked, kept)
        kept.make_by(self._make(asked, recorded, scope, body))
        await recorded.is_kept.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.store.timings.refused_within_s):
                await recorded.has_started.wait()
        if recorded.refusal is not None:
            with contextlib.suppress(ApiError):
                await self.store.delete(kept)
            status, headers, refused = recorded.refusal
            return await send_json(send, refused, status, headers)
        if asked.wants_stream:
            return await _send_events(kept.after, 0, receive, send)
        await send_json(send, orjson.dumps(kept.fields))

    def _continue(self, lost: LostResponse) -> None:
        """Continue a background response whose process has ended, unless it was ended or deleted meanwhile."""
        kept = lost.response
        if kept.is_ended or kept.is_deleted or kept.is_left:
            return kept.make_by(self.store.settle(kept))
        log.warning("the response %s continues here, because its process has ended", kept.id)
        try:
            asked, client = AskedResponse.restored(lost.request, kept)
            scope, body = self._door.restored(client, kept, lost.events), asked.inner()
        except Exception:  # the request may be damaged, or another release's
            log.exception("the response %s cannot continue", kept.id)
            kept.end_as("failed", LOST)
            return kept.make_by(self.store.settle(kept))
        kept.make_by(self._make(asked, _Recorded(asked, kept), _sized(scope, body), body, is_new=False))

    async def _make(
        self, asked: AskedResponse, recorded: "_Recorded", scope: Scope, body: bytes, *, is_new: bool = True
    ) -> None:
        error = ApiError("internal_error", "the response broke off before its end")
        try:
            if is_new:
                await self.store.begin(recorded.kept)
            recorded.is_kept.set()
            with self._door.held(scope):
                await self._app(scope, _replayed(body, None), recorded)
            # After the application has recorded the usage: no process does that for a response whose end is stored.
            recorded.keep_rest()
            if recorded.last is not None and not recorded.kept.is_left:
                await self.store.end(recorded.kept, recorded.last)
        except asyncio.CancelledError:
            recorded.kept.end_as("cancelled")
            raise
        except ApiError as refused:
            recorded.refuse(refused)
        except Exception:
            log.exception("the response %s failed", recorded.kept.id)
        finally:
            recorded.is_kept.set()
            recorded.has_started.set()
            recorded.kept.end_as("failed", recorded.error or error)
            await self.store.settle(recorded.kept)
            if asked.conversation is not None and recorded.kept.fields["status"] in ("completed", "incomplete"):
                with contextlib.suppress(ApiError):  # the conversation was deleted meanwhile
                    await self.conversations.advance(recorded.kept, asked.conversation)

    async def _cancel(self, kept: KeptResponse, send: Send) -> None:
        if kept.fields["background"] is not True:
            raise ApiError("invalid_request", "only a response created with background: true can be cancelled")
        if not kept.is_ended and kept.task is not None:
            kept.task.cancel()
            await asyncio.wait({kept.task}, timeout=WRITTEN_WITHIN_S)
        elif not kept.is_ended:
            kept = await self.store.cancel(kept)
        await send_json(send, orjson.dumps(kept.fields))

    def _events(self, kept: KeptResponse) -> EventsAfter:
        """Return a function that reads a response's events, from this process or from the database."""
        if kept.fields["background"] is not True:
            raise ApiError("invalid_request", "only a response created with background: true can be streamed again")
        return kept.after if kept.task is not None else partial(self.store.after, kept)


class _Patched:
    """An ASGI `send` for the inner application: it rewrites events for the client and stores the response."""

    def __init__(
        self, asked: AskedResponse, send: Send, keep: Callable[[KeptResponse], Awaitable[bool]] | None
    ) -> None:
        self._asked = asked
        self._send = send
        self._keep = keep
        self._start: Message = {}
        self._is_stream = False
        self._decoder = EventDecoder()
        self._whole = bytearray()
        self._num_events = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._is_stream = _content_type(message) == "text/event-stream"
            if self._is_stream:
                await self._send(message)
        elif self._is_stream:
            await self._send_events(message)
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_whole()

    async def _send_events(self, message: Message) -> None:
        events = self.events(message.get("body", b""))
        last = next((i for i, event in enumerate(events) if self._keep is not None and event.startswith(_LAST)), None)
        if last is not None:
            if last:  # the earlier events of this chunk do not wait for the disk
                await self._send({**message, "body": b"".join(events[:last]), "more_body": True})
            events = [await self._kept(events[last]), *events[last + 1 :]]
        await self._send({**message, "body": b"".join(events)})

    async def _kept(self, last: bytes) -> bytes:
        """Store the response in the last event; return the event, with `store` false if storing failed."""
        event = parse_event(last)
        assert event.data is not None
        assert event.name is not None
        fields = orjson.loads(event.data)
        await self._keep_or_say(fields["response"])
        return encode_event(orjson.dumps(fields), name=event.name.decode())

    async def _keep_or_say(self, response: Fields) -> None:
        if self._keep is not None and not await self._keep(self._asked.kept(response)):
            response["store"] = False

    def events(self, chunk: bytes) -> list[bytes]:
        """Convert a chunk from the inner application to the events for the client."""
        return [self._event(raw) for raw in self._decoder.split(chunk)] if chunk else []

    def _event(self, raw: bytes) -> bytes:
        event = parse_event(raw)
        if event.data is None:
            return raw
        self._num_events += 1
        if event.name == b"error":
            return _numbered_error(raw, self._num_events - 1)
        if event.name not in _LIFECYCLE:
            return raw
        fields = orjson.loads(event.data)
        fields["response"] = self._asked.patched(fields["response"])
        return encode_event(orjson.dumps(fields), name=event.name.decode())

    async def _send_whole(self) -> None:
        body = bytes(self._whole)
        if self._start["status"] == 200:
            response = self._asked.patched(orjson.loads(body))
            await self._keep_or_say(response)
            body = orjson.dumps(response)
        headers = [pair for pair in self._start["headers"] if pair[0] != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", b"%d" % len(body))]})
        await self._send({"type": "http.response.body", "body": body})


class _Recorded(_Patched):
    """An ASGI `send` for a background response: stores its events and its state; there is no client."""

    def __init__(self, asked: AskedResponse, kept: KeptResponse) -> None:
        super().__init__(asked, self._ignored, None)
        self.kept = kept
        self.last: Fields | None = None  # the response as its last event has it
        self._num_events = len(kept.events)
        self._pending: list[bytes] = []  # events that wait for their resume point
        self.is_kept = asyncio.Event()  # set when the response is stored, or could not be stored
        self.has_started = asyncio.Event()
        self.refusal: tuple[int, list[tuple[str, str]], bytes] | None = None
        self.error: ApiError | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._is_stream = _content_type(message) == "text/event-stream"
        elif self._is_stream:
            self._record(message.get("body", b""))
        else:
            self._whole += message.get("body", b"")
            if not message.get("more_body", False):
                self._refused()

    def _record(self, chunk: bytes) -> None:
        for raw in self._decoder.split(chunk):
            told, point = strip_resume_point(raw)
            event = parse_event(told := self._event(told))
            if event.data is None:
                continue
            self.has_started.set()
            fields = orjson.loads(event.data)
            if event.name in _LAST_NAMES:
                self.last = fields["response"]
            elif event.name in _LIFECYCLE:
                self.kept.fields = fields["response"]
            elif event.name == b"error":
                word = fields["code"] if fields.get("code") else "internal_error"
                self.error = ApiError(word, fields["message"])
            self._pending.append(raw.partition(b"\n")[0] + b"\n" + told if point is not None else told)
            if self.last is None and (point is not None or self.kept.request is None):
                self.keep_rest()

    def keep_rest(self) -> None:
        """Let the events that have arrived be stored."""
        self.kept.untold += self._pending
        self._pending.clear()

    def refuse(self, error: ApiError) -> None:
        """Record an error as the refusal of the request."""
        body = orjson.dumps(error.body(Dialect.OPENAI_RESPONSES))
        self.error, self.refusal = error, (error.status(Dialect.OPENAI_RESPONSES), error.headers(), body)

    def _refused(self) -> None:
        error = orjson.loads(bytes(self._whole)).get("error") or {}
        self.error = ApiError(error.get("code") or "internal_error", str(error.get("message")))
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._start["headers"]]
        kept = [pair for pair in headers if pair[0] not in ("content-length", "content-type")]
        self.refusal = (self._start["status"], kept, bytes(self._whole))
        self.has_started.set()

    async def _ignored(self, message: Message) -> None:
        pass


def _listed(items: bytes, query: dict[str, str]) -> bytes:
    """Return a page of a response's input items, the newest first by default."""
    found = orjson.loads(b"[" + items + b"]")
    if query.get("order", "desc") != "asc":
        found.reverse()
    ids = [item.get("id") for item in found]
    if (after := query.get("after")) is not None:
        if after not in ids:
            raise ApiError("invalid_request", f"after: there is no item {after[:100]!r}", param="after")
        found = found[ids.index(after) + 1 :]
    limit = min(MOST_LISTED, query_number(query, "limit", 20))
    page = found[:limit]
    first, last = (page[0].get("id"), page[-1].get("id")) if page else (None, None)
    listed = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(found) > limit}
    return orjson.dumps(listed)


def _query(scope: Scope) -> dict[str, str]:
    return {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}


def _numbered_error(raw: bytes, number: int) -> bytes:
    told = {**orjson.loads(parse_event(raw).data or b""), "sequence_number": number}
    return encode_event(orjson.dumps(told), name="error")


async def _send_events(after: EventsAfter, place: int, receive: Receive, send: Send) -> None:
    headers = [("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache")]
    await send(response_start(200, headers))

    async def tell() -> None:
        while True:
            try:
                async with asyncio.timeout(HEARTBEAT_S):
                    batch, is_last = await after(place)
            except TimeoutError:
                batch, is_last = [HEARTBEAT], False
            except ApiError as error:
                batch, is_last = [_numbered_error(error.event(Dialect.OPENAI_RESPONSES), place)], True
            else:
                told(len(batch))
            await send({"type": "http.response.body", "body": b"".join(batch), "more_body": not is_last})
            if is_last:
                return

    def told(number: int) -> None:
        nonlocal place
        place += number

    await until_disconnect(receive, tell())


def _sized(scope: Scope, body: bytes) -> Scope:
    headers = [pair for pair in scope["headers"] if pair[0] not in (b"content-length", b"transfer-encoding")]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}


def _replayed(body: bytes, receive: Receive | None) -> Receive:
    """Return a `receive` that delivers a body that was read already.
    Without the client's own `receive` it never reports a disconnect."""
    is_told = False

    async def replayed() -> Message:
        nonlocal is_told
        if not is_told:
            is_told = True
            return {"type": "http.request", "body": body, "more_body": False}
        if receive is not None:
            return await receive()
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    return replayed


def _content_type(start: Message) -> str:
    value = next((value for name, value in start["headers"] if name == b"content-type"), b"")
    return bytes(value).decode("latin-1").partition(";")[0].strip().lower()

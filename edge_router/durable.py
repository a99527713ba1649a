"""Streams that can be read again: the events of each are kept, in memory, until some time after its end, and outlive the client that asked.

A recording takes the place of the client towards the proxy, so that a durable stream goes on at another site as any other does. Its events get ids
of their own where a site's repeat or are missing: after any id it is exact what has not been read. A stream belongs to its tenant; nobody else
learns that there is one. Bounded in bytes and in time. Knows no sites.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from edge_router.admission import Admission
from edge_router.downstream import ClientGone, Downstream, ResponseWriter
from edge_router.preferences import preferences
from edge_router.request import Head
from edge_router.session import tenant_salt
from sites.network import DurableConfig
from wire.errors import ApiError
from wire.sse import CONTENT_TYPE, HEARTBEAT, Event, EventDecoder, encode_event

STREAM = "x-pilotlight-stream"  # router -> client: the name of a stream that can be read again
PATH = "/streams/"
LAST_EVENT_ID = "last-event-id"
EVENT_BYTES = 200  # what an event costs beside its bytes
HEARTBEAT_S = 10.0


def is_mentioned(head: Head, body: bytes) -> bool:
    """Whether `asks_for_it` need be asked at all."""
    return head.has("prefer") or b'"durable"' in body


def asks_for_it(head: Head, body: bytes) -> tuple[bool, bool, bytes]:
    """Whether the stream is to be durable, whether the client does not want to wait for it, and the body as a site is to see it."""
    if not is_mentioned(head, body):
        return False, False, body
    wishes = preferences(value for name, value in head.headers if name == "prefer")
    is_async = wishes.get("respond-async") == ""  # with a value it is none that anybody has defined
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return False, False, body  # the proxy has the words for that
    if not isinstance(fields, dict):
        return False, False, body
    options = fields.get("stream_options")
    durable = options.pop("durable", None) if isinstance(options, dict) else None
    if durable is not None and not isinstance(durable, bool):
        raise ApiError(
            "invalid_request", "stream_options.durable must be true or false", param="stream_options.durable"
        )
    if durable and fields.get("stream") is not True:
        raise ApiError(
            "invalid_request", "a durable answer must be a stream: set stream to true", param="stream_options.durable"
        )
    if is_async and fields.get("stream") is not True:
        is_async = False  # a preference, not a demand: an answer in one piece is waited for
    if durable is None:
        return is_async, is_async, body
    if not options:
        del fields["stream_options"]
    return durable or is_async, is_async, orjson.dumps(fields)


class Recording:
    """One stream's events. Towards the proxy it is the client, one that never leaves and never keeps it waiting."""

    def __init__(
        self, name: str, tenant: bytes, client: ResponseWriter, config: DurableConfig, started_at: float
    ) -> None:
        self.name = name
        self.tenant = tenant
        self.head = client.head
        self.address = client.address  # where it was when it asked: it may have left
        self.request_id = client.request_id
        self.is_streaming = False
        self.has_answered = False
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self.body: bytes | None = None  # of a refusal: there is no stream
        self.num_bytes = 0
        self.body_bytes = 0  # of the request, for as long as it may have to be sent to another site
        self.started_at = started_at
        self.ended_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.last_words = ApiError("aborted", "the stream was stopped")  # where its work is ended from outside
        self._max_bytes = int(config.max_stream_mib * 2**20)
        self._events: list[bytes] = []
        self._places: dict[bytes, int] = {}  # event id -> how many events lie up to it
        self._last_id = b"begin"  # no site's: what comes before the first id is named after it
        self._repeats = 0
        self._changed = asyncio.Event()

    # what the proxy says

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status, self.headers, self.body, self.has_answered = status, headers, body, True
        self._tell()

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.status, self.headers, self.has_answered, self.is_streaming = status, headers, True, True
        self._tell()

    async def write(self, batch: bytes) -> None:
        """Whole events."""
        for event in EventDecoder(len(batch) + 1).feed(batch):
            if event.data is not None:
                self._keep(event)
            if self.num_bytes > self._max_bytes:
                sentence = f"the answer is larger than {self._max_bytes / 2**20:g} MiB, which is all that is kept of a durable stream"
                raise ApiError("aborted", sentence)
        self._tell()

    async def end_stream(self) -> None:
        """The task's end is the stream's."""

    async def refuse(self, error: ApiError) -> None:
        body = orjson.dumps(error.body(self.head.dialect))
        if self.is_streaming:
            for event in EventDecoder().feed(encode_event(body)):
                self._keep(event)
            self._tell()
        elif not self.has_answered:
            headers = [*error.headers(), ("content-type", "application/json")]
            await self.respond(error.status(self.head.dialect), headers, body)

    def cut(self, error: ApiError) -> None:
        """Ends the work from outside; readers are told `error`."""
        self.last_words = error
        if self.task is not None:
            self.task.cancel()

    # what readers ask

    async def begun(self) -> None:
        while not self.has_answered and self.ended_at is None:
            await self._change()

    def place_after(self, event_id: str) -> int:
        """Raises ApiError for an id that this stream has not had."""
        if not event_id:
            return 0
        place = self._places.get(event_id.encode("latin-1", "replace"))
        if place is None:
            raise ApiError(
                "invalid_request",
                f"this stream has no event {event_id[:100]!r}: leave {LAST_EVENT_ID} out to read it from its beginning",
            )
        return place

    async def read(self, place: int) -> AsyncGenerator[bytes, None]:
        """Events from there on, as many at once as there are, until the end; a comment where there are none for long."""
        while True:
            if place < len(self._events):
                batch = b"".join(self._events[place:])
                place = len(self._events)
                yield batch
            elif self.ended_at is not None:
                return
            else:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._change()
                except TimeoutError:
                    yield HEARTBEAT

    def end(self, now: float) -> None:
        self.ended_at = now
        self.body_bytes = 0
        self._tell()

    def _keep(self, event: Event) -> None:
        given, raw = event.event_id, event.raw
        if given is None or given in self._places:
            while given is None or given in self._places:
                self._repeats += 1
                given = b"%s.%d" % (self._last_id, self._repeats)
            raw = encode_event(
                event.data or b"", given.decode("latin-1"), event.name.decode("latin-1") if event.name else None
            )
        else:
            self._last_id, self._repeats = given, 0
        self._events.append(raw)
        self._places[given] = len(self._events)
        self.num_bytes += len(raw) + EVENT_BYTES

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()


class Recordings:
    """All of a router's. A name is 128 random bits, but that alone opens nothing: the tenant must be the same."""

    def __init__(self, config: DurableConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._all: OrderedDict[str, Recording] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_bytes(self) -> int:
        return sum(recording.num_bytes + recording.body_bytes for recording in self._all.values())

    def start(
        self, tenant: bytes, client: Downstream, work: Callable[[Recording], Coroutine[Any, Any, None]]
    ) -> Recording:
        """Raises ApiError while those that have not ended fill the memory. `work` fills the recording and raises nothing."""
        self.forget()
        if self.num_bytes >= self.config.max_total_mib * 2**20:
            raise ApiError(
                "overloaded",
                "the router keeps as many durable streams as it can: ask again later, or without durable",
                retry_after_s=5,
            )
        recording = Recording(secrets.token_hex(16), tenant, client, self.config, self._clock())
        self._all[recording.name] = recording
        recording.task = asyncio.create_task(self._run(recording, work))
        return recording

    def find(self, name: str, tenant: bytes) -> Recording:
        """Raises ApiError: somebody else's stream is none."""
        self.forget()
        recording = self._all.get(name)
        if recording is None or recording.tenant != tenant:
            raise ApiError("not_found", "there is no such stream: it was never yours, or its time is over")
        return recording

    async def stop(self, recording: Recording) -> None:
        """Ends it if it has not ended, and forgets it."""
        self._all.pop(recording.name, None)
        if recording.task is not None:
            recording.task.cancel()
            await asyncio.gather(recording.task, return_exceptions=True)

    async def close(self) -> None:
        for recording in tuple(self._all.values()):
            await self.stop(recording)

    def forget(self) -> None:
        """What is past its time, and of what has ended as much as does not fit."""
        now = self._clock()
        for name, recording in list(self._all.items()):
            if recording.ended_at is not None and now - recording.ended_at > self.config.keep_s:
                del self._all[name]
        excess = self.num_bytes - self.config.max_total_mib * 2**20
        for recording in sorted(self._all.values(), key=lambda kept: kept.ended_at or now) if excess > 0 else ():
            if excess <= 0:
                break
            if recording.ended_at is not None:
                del self._all[recording.name]
                excess -= recording.num_bytes

    async def _run(self, recording: Recording, work: Callable[[Recording], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(self.config.max_age_s):
                await work(recording)
        except TimeoutError:
            await recording.refuse(ApiError("aborted", f"the stream had not ended after {self.config.max_age_s:g} s"))
        except asyncio.CancelledError:
            await recording.refuse(recording.last_words)
            raise
        finally:
            recording.end(self._clock())


async def tell(recording: Recording, client: Downstream, place: int) -> None:
    """To a client that reads along or again."""
    await recording.begun()
    if recording.body is not None:
        return await client.respond(recording.status, [*recording.headers, (STREAM, recording.name)], recording.body)
    if not recording.has_answered:
        raise ApiError("aborted", "the stream was stopped before its answer began")
    kept = [pair for pair in recording.headers if pair[0] not in ("content-type", "content-length")]
    headers = [*kept, ("content-type", CONTENT_TYPE), (STREAM, recording.name), ("cache-control", "no-store")]
    await client.start_stream(recording.status, headers)
    async with aclosing(recording.read(place)) as batches:
        async for batch in batches:
            await client.write(batch)
    await client.end_stream()


async def accepted(recording: Recording, client: Downstream) -> None:
    """For a client that does not want to wait."""
    where = PATH + recording.name
    headers = [
        ("location", where),
        ("preference-applied", "respond-async"),
        (STREAM, recording.name),
        ("content-type", "application/json"),
    ]
    body = orjson.dumps({"id": recording.name, "object": "stream", "url": where})
    await client.respond(202, [*headers, ("content-length", str(len(body)))], body)


def owner_of(head: Head, secret: str) -> bytes:
    """Whose streams they are: the key's. (The path of a stream names no account.)"""
    return tenant_salt(head.key, "", secret)


class StreamRoutes:
    """GET and DELETE of /streams/ID, as an ASGI application."""

    def __init__(self, recordings: Recordings, admission: Admission, secret: str) -> None:
        self._recordings = recordings
        self._admission = admission
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        try:
            self._admission.access.check_client(client.head.header("authorization"))
            with self._admission.limits.admitted(client.head, client.address):
                await client.while_present(self._answer(client))
        except ClientGone:
            return
        except ApiError as error:
            await client.refuse(error)

    async def _answer(self, client: Downstream) -> None:
        head = client.head
        recording = self._recordings.find(head.path.removeprefix(PATH), owner_of(head, self._secret))
        if head.method == "DELETE":
            await self._recordings.stop(recording)
            return await client.respond(204, [], b"")
        if head.method != "GET":
            raise ApiError("method_not_allowed", f"a stream does not take {head.method}: GET reads it, DELETE stops it")
        await tell(recording, client, recording.place_after(head.header(LAST_EVENT_ID)))

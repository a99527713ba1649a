"""Streams that can be read again: the events of each are kept, in memory, until some time after its end, and outlive the client that asked.

A recording takes the place of the client towards the proxy, so that a durable stream goes on at another site as any other does. Its events are
numbered, and only here: clients that read line by line expect none in a stream that cannot be read again. A stream belongs to its tenant; nobody else
learns that there is one. Bounded in bytes and in time. Knows no sites.
"""

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, NamedTuple

import orjson
from starlette.types import Receive, Scope, Send

from edge_router.admission import AdmissionFilter, tenant_of
from edge_router.downstream import Downstream, DownstreamGone, ResponseWriter
from sites.network import DurableConfig
from wire.errors import ApiError
from wire.sse import CONTENT_TYPE, HEARTBEAT, Event, EventDecoder, encode_event

STREAM = "x-pilotlight-stream"  # router -> client: the name of a stream that can be read again
PATH = "/streams/"
LAST_EVENT_ID = "last-event-id"
EVENT_BYTES = 200  # what an event costs beside its bytes
HEARTBEAT_S = 10.0


class EventBuffer:
    """One stream's events, numbered from 1 by their ids, for any number of readers."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_ended = False
        self._events: list[bytes] = []
        self._changed = asyncio.Event()

    def add(self, event: Event) -> None:
        name = event.name.decode("latin-1") if event.name else None
        raw = encode_event(event.data or b"", len(self._events) + 1, name)
        self._events.append(raw)
        self.num_bytes += len(raw) + EVENT_BYTES

    def place_after(self, event_id: str) -> int:
        """Raises ApiError for an id that this stream has not had."""
        if not event_id:
            return 0
        if event_id.isascii() and event_id.isdigit() and len(event_id) < 10 and int(event_id) <= len(self._events):
            return int(event_id)
        raise ApiError(
            "invalid_request",
            f"this stream has no event {event_id[:100]!r}: leave {LAST_EVENT_ID} out to read it from its beginning",
        )

    async def read(self, place: int) -> AsyncGenerator[bytes, None]:
        """Events from there on, as many at once as there are, until the end; a comment where there are none for long."""
        while True:
            if place < len(self._events):
                batch = b"".join(self._events[place:])
                place = len(self._events)
                yield batch
            elif self.is_ended:
                return
            else:
                try:
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self.change()
                except TimeoutError:
                    yield HEARTBEAT

    def notify(self) -> None:
        """Wake all readers."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self) -> None:
        await self._changed.wait()


class RecordedAnswer(NamedTuple):
    status: int
    headers: list[tuple[str, str]]
    body: bytes | None  # of a refusal: there is no stream


class DurableStream:
    """One durable stream. Towards the proxy it is the client, one that never leaves and never keeps it waiting."""

    def __init__(self, name: str, tenant: bytes, client: ResponseWriter, config: DurableConfig) -> None:
        self.name = name
        self.tenant = tenant
        self.head = client.head
        self.address = client.address  # where it was when it asked: it may have left
        self.request_id = client.request_id
        self.answer: RecordedAnswer | None = None
        self.events = EventBuffer()
        self.body_bytes = 0  # of the request, for as long as it may have to be sent to another site
        self.ended_at: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.last_words = ApiError("aborted", "the stream was stopped")  # where its work is ended from outside
        self._max_bytes = int(config.max_stream_mib * 2**20)

    @property
    def num_bytes(self) -> int:
        return self.events.num_bytes + self.body_bytes

    # what the proxy calls

    @property
    def is_streaming(self) -> bool:
        return self.answer is not None and self.answer.body is None

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.answer = RecordedAnswer(status, headers, body)
        self.events.notify()

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        self.answer = RecordedAnswer(status, headers, None)
        self.events.notify()

    async def write(self, batch: bytes) -> None:
        """`batch` is whole events. Raises ApiError where they are more than is kept."""
        for event in EventDecoder(len(batch) + 1).feed(batch):
            if event.data is not None:
                self.events.add(event)
            if self.events.num_bytes > self._max_bytes:
                sentence = f"the answer is larger than {self._max_bytes / 2**20:g} MiB, which is all that is kept of a durable stream"
                raise ApiError("aborted", sentence)
        self.events.notify()

    async def end_stream(self) -> None:
        """The task's end is the stream's."""

    async def refuse(self, error: ApiError) -> None:
        if self.is_streaming:
            for event in EventDecoder().feed(error.event(self.head.dialect)):
                self.events.add(event)
            self.events.notify()
        elif self.answer is None:
            headers = [*error.headers(), ("content-type", "application/json")]
            body = orjson.dumps(error.body(self.head.dialect))
            await self.respond(error.status(self.head.dialect), headers, body)

    def cut(self, error: ApiError) -> None:
        """End the work from outside; readers are told `error`."""
        self.last_words = error
        if self.task is not None:
            self.task.cancel()

    def look(self, now: float, awake_since: float) -> None:
        """It keeps nobody waiting."""

    # what readers call

    async def begun(self) -> RecordedAnswer:
        """Raises ApiError where the stream was stopped before its answer began."""
        while self.answer is None and self.ended_at is None:
            await self.events.change()
        if self.answer is None:
            raise ApiError("aborted", "the stream was stopped before its answer began")
        return self.answer

    def end(self, now: float) -> None:
        self.ended_at = now
        self.body_bytes = 0
        self.events.is_ended = True
        self.events.notify()


class DurableStreams:
    """All of a router's. A name is 128 random bits, but that alone opens nothing: the tenant must be the same."""

    def __init__(self, config: DurableConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self._clock = clock
        self._all: OrderedDict[str, DurableStream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_bytes(self) -> int:
        return sum(recording.num_bytes for recording in self._all.values())

    def start(
        self, tenant: bytes, client: Downstream, work: Callable[[DurableStream], Coroutine[Any, Any, None]]
    ) -> DurableStream:
        """Raises ApiError while those that have not ended fill the memory. `work` fills the recording and raises nothing."""
        self.forget()
        if self.num_bytes >= self.config.max_total_mib * 2**20:
            raise ApiError(
                "overloaded",
                "the router keeps as many durable streams as it can: ask again later, or without durable",
                retry_after_s=5,
            )
        recording = DurableStream(secrets.token_hex(16), tenant, client, self.config)
        self._all[recording.name] = recording
        recording.task = asyncio.create_task(self._run(recording, work))
        return recording

    def find(self, name: str, tenant: bytes) -> DurableStream:
        """Raises ApiError: somebody else's stream is none."""
        self.forget()
        recording = self._all.get(name)
        if recording is None or recording.tenant != tenant:
            raise ApiError("not_found", "there is no such stream: it was never yours, or its time is over")
        return recording

    async def stop(self, recording: DurableStream) -> None:
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

    async def _run(self, recording: DurableStream, work: Callable[[DurableStream], Coroutine[Any, Any, None]]) -> None:
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


async def tell(recording: DurableStream, client: Downstream, place: int) -> None:
    """To a client that reads along or again."""
    answer = await recording.begun()
    if answer.body is not None:
        return await client.respond(answer.status, [*answer.headers, (STREAM, recording.name)], answer.body)
    kept = [pair for pair in answer.headers if pair[0] not in ("content-type", "content-length")]
    headers = [*kept, ("content-type", CONTENT_TYPE), (STREAM, recording.name), ("cache-control", "no-store")]
    await client.start_stream(answer.status, headers)
    async with aclosing(recording.events.read(place)) as batches:
        async for batch in batches:
            await client.write(batch)
    await client.end_stream()


async def accepted(recording: DurableStream, client: Downstream) -> None:
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


class StreamRoutes:
    """GET and DELETE of /streams/ID, as an ASGI application."""

    def __init__(self, recordings: DurableStreams, admission: AdmissionFilter, secret: str) -> None:
        self._recordings = recordings
        self._admission = admission
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        try:
            client.head.holder = self._admission.access.holder(client.head.header("authorization"))
            with self._admission.limits.admitted(client.head, client.address):
                await client.while_present(self._answer(client))
        except DownstreamGone:
            return
        except ApiError as error:
            await client.refuse(error)

    async def _answer(self, client: Downstream) -> None:
        head = client.head
        recording = self._recordings.find(head.path.removeprefix(PATH), tenant_of(head, self._secret))
        if head.method == "DELETE":
            await self._recordings.stop(recording)
            return await client.respond(204, [], b"")
        if head.method != "GET":
            raise ApiError("method_not_allowed", f"a stream does not take {head.method}: GET reads it, DELETE stops it")
        await tell(recording, client, recording.events.place_after(head.header(LAST_EVENT_ID)))

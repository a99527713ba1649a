"""Streams that can be read again, after a disconnect of the client and for some time after their end.

A recording acts as the client of the proxy, so that a durable stream continues at another site like any other. Only its events are numbered, because
line-by-line clients expect no ids in other streams. A stream belongs to its tenant and is invisible to others. It is kept in memory and, if a folder
is configured, in a journal (journal.py): then every router with the folder serves its readers, and continues the answer when the router that works on
it ends. Size and lifetime are limited.
"""

import asyncio
import logging
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from pilotlight.dialects.table import is_final
from pilotlight.edge_router.admission.filter import AdmissionFilter, tenant_of
from pilotlight.edge_router.durable.event_buffer import EVENT_BYTES, LAST_EVENT_ID, EventBuffer
from pilotlight.edge_router.durable.journal import (
    AnswerStarted,
    Entry,
    Journal,
    JournalEvents,
    JournalHeader,
    Journals,
    StreamEnded,
    StreamStopped,
    points_of,
)
from pilotlight.edge_router.forwarding.downstream import Downstream, ResponseWriter
from pilotlight.edge_router.forwarding.relay import DeliveryLog
from pilotlight.edge_router.forwarding.request_state import StartedAnswer
from pilotlight.edge_router.requests.request import Head
from pilotlight.sites.network import DurableConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.continuation import AnswerName, ContinuationError
from pilotlight.wire.hop.headers import OURS
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import UsageRecord
from pilotlight.wire.sse import CONTENT_TYPE, EventDecoder

STREAM = "x-pilotlight-stream"  # router -> client: the name of a stream that can be read again
PATH = "/streams/"
FOLLOW_S = 0.1  # how often a stream of another router is read
CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})  # headers that are not written to the disk

log = logging.getLogger(__name__)

Handle = Callable[[ResponseWriter, Coroutine[Any, Any, None]], Coroutine[Any, Any, None]]


class DurableStream:
    """One durable stream. To the proxy it is a client that never disconnects and always reads."""

    def __init__(
        self, name: str, asked: JournalHeader, head: Head, config: DurableConfig, journal: Journal | None = None
    ) -> None:
        self.name = name
        self.asked = asked
        self.head = head
        self.address = asked.address  # the client's address when it sent the request; it may have disconnected
        self.request_id = asked.request_id
        self.answer: AnswerStarted | None = None
        self.log = DeliveryLog()
        self.events = EventBuffer()
        self.journal = journal
        self.task: asyncio.Task[None] | None = None
        # the error if the stream is stopped from outside
        self.last_words = ApiError("aborted", "the stream was stopped")
        self._max_bytes = int(config.max_stream_mib * 2**20)
        self._decoder = EventDecoder(self._max_bytes)

    @property
    def num_bytes(self) -> int:
        """Return the size in bytes. It includes the request while another site might need it."""
        return self.events.num_bytes + (len(self.asked.body) if self.events.ended_at is None else 0)

    @property
    def started(self) -> StartedAnswer:
        part = "" if self.journal is None else f"{self.name}.{self.journal.num_parts}"
        return StartedAnswer(self.asked.answer, self.log, part)

    # Methods that the proxy calls.

    @property
    def is_streaming(self) -> bool:
        return self.answer is not None and self.answer.body is None

    async def respond(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        await self._keep(AnswerStarted(status, tuple(headers), body))

    async def start_stream(self, status: int, headers: list[tuple[str, str]]) -> None:
        await self._keep(AnswerStarted(status, tuple(headers), None))

    async def write(self, batch: bytes) -> None:
        """Append the whole events of a batch. The rest waits for the next batch, as a function writes pieces.
        Raises ApiError if they exceed the limit."""
        size = self.events.num_bytes + self._decoder.pending_bytes + len(batch)
        if size + EVENT_BYTES * batch.count(b"\n\n") > self._max_bytes:
            sentence = f"the answer is larger than {self._max_bytes / 2**20:g} MiB, the limit of a durable stream"
            raise ApiError("aborted", sentence)
        if events := self._decoder.split(batch):
            await self._keep(JournalEvents(b"".join(events), self.log.take_untold()))

    def write_now(self, batch: bytes) -> bool:
        """Return False: each batch is written to a disk first."""
        return False

    async def end_stream(self) -> None:
        """Do nothing: the stream ends when its task ends."""

    async def refuse(self, error: ApiError) -> None:
        journal = self.journal
        if self.is_streaming:
            last = error.event(self.head.dialect)
            if journal is None or journal.is_ours or journal.has_failed:
                await self._keep(JournalEvents(last, ()))
            else:  # the answer may continue at another router, which does not know this event, so the event gets no number
                self.events.add_last(last)
        elif self.answer is None:
            headers = [*error.headers(), ("content-type", "application/json")]
            body = orjson.dumps(error.body(self.head.dialect))
            await self.respond(error.status(self.head.dialect), headers, body)

    def cut(self, error: ApiError) -> None:
        """Cancel the task that fills the stream; readers get `error`."""
        self.last_words = error
        if self.task is not None:
            self.task.cancel()

    def look(self, now: float, awake_since: float) -> None:
        """Do nothing: a recording never waits."""

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run the work that fills the stream, in a task that `cut` ends."""
        self.task = asyncio.create_task(work)

    # Methods that readers call.

    async def started_answer(self) -> AnswerStarted:
        """Wait for the start of the answer. Raises ApiError if the stream was stopped before."""
        while self.answer is None and self.events.ended_at is None:
            await self.events.change()
        if self.answer is None:
            raise ApiError("aborted", "the stream was stopped before its answer began")
        return self.answer

    # Methods that apply entries of the journal.

    def replay(self, entries: list[Entry]) -> bool:
        """Apply entries from another router's journal. Return whether they contain the whole answer."""
        for entry in entries:
            self._apply(entry)
        for point in points_of(entries):
            self.log.add(point)
        self.events.notify()
        last = self.events.last
        return StreamEnded() in entries or (last is not None and is_final(last))

    @property
    def may_go_on(self) -> bool:
        """Tell whether another router can produce the rest of the answer, or all if nothing was published."""
        return self.log.has_started or (self.events.last is None and self.head.may_be_repeated)

    async def _keep(self, entry: AnswerStarted | JournalEvents) -> None:
        """Write an entry. Raises ApiError if the stream was stopped at another router."""
        if self.journal is not None:
            try:
                await self.journal.keep(entry)
            except StreamStopped:
                raise ApiError("aborted", "the stream was stopped") from None
        self._apply(entry)
        self.events.notify()

    def _apply(self, entry: Entry) -> None:
        if isinstance(entry, AnswerStarted):
            self.answer = entry
        elif isinstance(entry, JournalEvents):
            for event in EventDecoder(len(entry.events) + 1).feed(entry.events):
                if event.data is not None:
                    self.events.add(event)


Work = Callable[[DurableStream], Coroutine[Any, Any, None]]


class DurableStreams:
    """All streams of a router.
    A name is 128 random bits, but that alone grants nothing: the tenant must match."""

    def __init__(self, config: DurableConfig, clock: Callable[[], float]) -> None:
        """Open the folder. Raises OSError if it cannot be used."""
        self.config = config
        self.journals = None if config.directory is None else Journals(Path(config.directory).expanduser())
        self._clock = clock
        self._all: OrderedDict[str, DurableStream] = OrderedDict()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def num_bytes(self) -> int:
        return sum(recording.num_bytes for recording in self._all.values())

    async def start(self, tenant: bytes, client: Downstream, body: bytes, work: Work) -> DurableStream:
        """Start a stream that `work` fills; `work` must not raise.

        Raises ApiError while streams that have not ended fill the memory.
        """
        self._check_room()
        head = client.head
        kept = tuple(pair for pair in head.headers if pair[0] not in CREDENTIALS and not pair[0].startswith(OURS))
        asked = JournalHeader(
            tenant, head.method, head.path, head.target, kept, head.scheme, client.address, client.request_id, body, AnswerName.fresh()
        )  # fmt: skip
        name = secrets.token_hex(16)
        journal = None if self.journals is None else await self.journals.begin(name, asked)
        recording = DurableStream(name, asked, head, self.config, journal)
        if journal is not None:
            recording.log.keep_untold()
        self._add(recording, work)
        return recording

    async def find(self, name: str, head: Head, tenant: bytes, work: Work) -> DurableStream:
        """Return a stream of this router, or of another one with the same folder.
        `head` is the head of the request to read it; `work` continues it if its router has ended. Raises ApiError (404) if it is unknown or belongs
        to another tenant."""
        self.forget()
        recording = self._all.get(name)
        if recording is None and self.journals is not None:
            recording = await self._found(self.journals, name, head, tenant, work)
        elif recording is not None and recording.journal is not None and not await recording.journal.is_there():
            await self.stop(recording)
            recording = None
        if recording is None or recording.asked.tenant != tenant:
            raise ApiError(
                "not_found", "there is no such stream: it does not exist, has expired, or belongs to another account"
            )
        return recording

    async def stop(self, recording: DurableStream) -> None:
        """Delete a stream; end it first if it has not ended."""
        if recording.journal is not None:
            recording.journal.remove()
        await self._leave(recording)

    async def close(self) -> None:
        """Stop all streams. Another router may continue those with a journal."""
        for recording in tuple(self._all.values()):
            await self._leave(recording)
        if self.journals is not None:
            self.journals.close()

    async def sweep(self) -> None:
        """Delete expired journals periodically until cancelled."""
        assert self.journals is not None
        await self.journals.run(self.config.keep_s, self.config.max_total_mib * 2**20)

    def corrected_usage(self, record: UsageRecord) -> UsageRecord:
        """Return a killed router's usage record without the tokens that its journal lacks.

        No client can read these, and the router that continues the stream counts them again.
        """
        name, _, part = record.request.part.partition(".")
        if self.journals is None or not part or record.outcome != "recovered":
            return record
        try:
            parts = self.journals.parts(name)
        except OSError as error:
            log.error("the last tokens of a durable stream may be counted twice: %s", error)
            return record
        if parts is None:  # the stream has expired
            return record
        told, before = DeliveryLog(), ResourceUse()
        for entries in parts[: int(part)]:
            before = told.used
            for point in points_of(entries):
                told.add(point)
        use = told.used.minus(before)
        return replace(record, use=ResourceUse(*use[:4], *record.use[4:]))  # keep the work that the sites have done

    def forget(self) -> None:
        """Delete expired streams.
        Above the size limit also delete ended ones, first the oldest of the tenant that uses most memory."""
        now = self._clock()
        for name, recording in list(self._all.items()):
            ended_at = recording.events.ended_at
            if ended_at is not None and now - ended_at > self.config.keep_s:
                del self._all[name]
        excess = self.num_bytes - self.config.max_total_mib * 2**20
        while excess > 0 and (victim := self._victim()) is not None:
            del self._all[victim.name]
            excess -= victim.num_bytes

    def _victim(self) -> DurableStream | None:
        ended = [kept for kept in self._all.values() if kept.events.ended_at is not None]
        held = Counter[bytes]()
        for kept in self._all.values():
            held[kept.asked.tenant] += kept.num_bytes
        return min(ended, key=lambda kept: (-held[kept.asked.tenant], kept.events.ended_at), default=None)

    def _check_room(self) -> None:
        self.forget()
        if self.num_bytes >= self.config.max_total_mib * 2**20:
            raise ApiError(
                "overloaded",
                "the router has no room for another durable stream: try again later, or without durable",
                retry_after_s=5,
            )

    def _add(self, recording: DurableStream, work: Work) -> None:
        self._all[recording.name] = recording
        recording.begin(self._run(recording, work))

    async def _leave(self, recording: DurableStream) -> None:
        self._all.pop(recording.name, None)
        if recording.task is not None:
            recording.task.cancel()
            await asyncio.gather(recording.task, return_exceptions=True)
        if recording.journal is not None:
            recording.journal.release()
        recording.events.end(self._clock())  # done here, because a task that has not started cannot end the stream

    async def _found(
        self, journals: Journals, name: str, head: Head, tenant: bytes, work: Work
    ) -> DurableStream | None:
        """Return another router's stream, followed from now on; None without a journal of this tenant.
        Its journal stays open while it is followed and is released after a refusal, so that other
        routers can continue it. Raises ApiError."""
        try:
            journal = await journals.find(name)
        except OSError as error:
            log.warning("a durable stream cannot be read: %s", error)
            journal = None
        if journal is None:
            return self._all.get(name)
        with ExitStack() as unless_followed:
            unless_followed.callback(journal.release)
            try:
                entries = await journal.read()
            except OSError as error:
                log.warning("a durable stream cannot be read: %s", error)
                entries = []
            if (
                name in self._all
                or not entries
                or not isinstance(asked := entries[0], JournalHeader)
                or asked.tenant != tenant
            ):
                return self._all.get(name)
            self._check_room()
            credentials = [pair for pair in head.headers if pair[0] in CREDENTIALS]
            headers = [*asked.headers, *credentials]
            began = Head(asked.method, asked.path, asked.target, headers, scheme=asked.scheme, holder=head.holder)
            recording = DurableStream(name, asked, began, self.config, journal)
            try:
                is_over = recording.replay(entries)
            except ContinuationError as error:
                raise ApiError("aborted", f"the stream's journal cannot be read: {error}") from None
            self._add(recording, partial(self._follow, journal=journal, work=work, is_over=is_over))
            unless_followed.pop_all()
            return recording

    async def _follow(self, recording: DurableStream, journal: Journal, work: Work, *, is_over: bool) -> None:
        """Follow a stream while another router works on it, and continue it when that router ends."""
        try:
            while not (is_over or journal.is_ours):
                await asyncio.sleep(FOLLOW_S)
                is_over = recording.replay(await journal.read())
            if is_over:
                return
            await journal.resume()
        except (OSError, StreamStopped, ContinuationError) as error:
            return await recording.refuse(
                ApiError("aborted", f"the rest of the stream cannot be read: {error or 'it was stopped'}")
            )
        if not recording.may_go_on:
            sentence = "the router that relayed this answer was lost, and such an answer cannot be continued"
            return await recording.refuse(ApiError("upstream_lost", sentence))
        recording.log.keep_untold()
        await work(recording)

    async def _run(self, recording: DurableStream, work: Work) -> None:
        journal = recording.journal
        try:
            async with asyncio.timeout(self.config.max_age_s):
                await work(recording)
        except TimeoutError:
            await recording.refuse(ApiError("aborted", f"the stream had not ended after {self.config.max_age_s:g} s"))
        except asyncio.CancelledError:
            if journal is not None:
                journal.release()
            await recording.refuse(recording.last_words)
            raise
        except Exception:
            log.exception("the durable stream %s failed inside the router", recording.name)
            await recording.refuse(ApiError("internal_error", "the router failed; its log has the reason"))
        finally:
            if journal is not None:
                journal.release(StreamEnded())
            recording.events.end(self._clock())


async def tell(recording: DurableStream, client: Downstream, place: int) -> None:
    """Send the events of a stream to a client, from `place` on."""
    answer = await recording.started_answer()
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
    """Respond at once, because the client asked not to wait, and name the stream."""
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

    def __init__(
        self, recordings: DurableStreams, admission: AdmissionFilter, secret: str, handle: Handle, work: Work
    ) -> None:
        """`handle` is Proxy.handle, which sends errors to clients; `work` continues another router's stream."""
        self._recordings = recordings
        self._admission = admission
        self._secret = secret
        self._handle = handle
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client = Downstream(scope, receive, send)
        await self._handle(client, self._admit(client))

    async def _admit(self, client: Downstream) -> None:
        client.head.hold(self._admission.access.holder(client.head.header("authorization")))
        await self._admission.limits.ready(client.head)
        with self._admission.limits.admitted(client.head, client.address):
            await client.while_present(self._answer(client))

    async def _answer(self, client: Downstream) -> None:
        head = client.head
        name = head.path.removeprefix(PATH)
        recording = await self._recordings.find(name, head, tenant_of(head, self._secret), self._work)
        if head.method == "DELETE":
            await self._recordings.stop(recording)
            return await client.respond(204, [], b"")
        if head.method != "GET":
            raise ApiError("method_not_allowed", f"a stream does not take {head.method}: GET reads it, DELETE stops it")
        await tell(recording, client, recording.events.place_after(head.header(LAST_EVENT_ID)))

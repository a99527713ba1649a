"""The log of invocations: stores a sample of them with their output, and sends all to tail consumers.

No request waits for it: ended invocations are written in batches, once a second.
"""

import asyncio
import logging
import random
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable

from pilotlight.functions.channel import frames
from pilotlight.functions.host.invocations.invocation import Invocation
from pilotlight.functions.host.invocations.log_export import LogExport
from pilotlight.functions.host.invocations.log_store import InvocationRow, LineRow, LogStore
from pilotlight.functions.host.invocations.tail_consumers import MAX_LINES, Ask, TailConsumers, trace_item
from pilotlight.functions.manifest import Manifest
from pilotlight.support.database import DatabaseError
from pilotlight.wire.hop.function_logs import LoggedInvocation, LogQuery

FLUSH_S = 1.0
TRIM_S = 60.0
MAX_UNWRITTEN_BYTES = 64 << 20  # memory of unwritten invocations and lines; more are counted and dropped
ROW_BYTES = 512  # memory of a row besides its texts; 200 to 320 bytes were measured
OUTSIDE = "printed outside of a request"

log = logging.getLogger("pilotlight.function")


class InvocationLog:
    def __init__(
        self,
        ask: Ask,
        store: LogStore | None = None,
        export: LogExport | None = None,
        max_bytes: int = MAX_UNWRITTEN_BYTES,
    ) -> None:
        """`ask` sends an event to a tail consumer.

        Without `store` nothing is stored, and without `export` no collector gets records. `max_bytes` limits the memory of unwritten records.
        """
        self.keeps = store is not None or export is not None
        self._store = store
        self._export = export
        self._consumers = TailConsumers(ask)
        self._last_id = 0
        self._rows: list[InvocationRow] = []
        self._lines: list[LineRow] = []
        # Id of the record for output outside of requests, by function and version; each flush starts new records.
        self._loose: dict[tuple[str, str], int] = {}
        self._ended: list[Callable[[], None]] = []  # deliveries to tail consumers
        self._max_bytes = max_bytes
        self._unwritten_bytes = 0  # memory of unwritten records
        self._batch_bytes = 0  # memory of those that no write has taken yet
        self._num_dropped = self._num_reported = 0  # dropped records, and those of them that were logged

    @property
    def num_dropped(self) -> dict[str, int]:
        """The number of dropped records, by the place that does not keep up."""
        return {
            "disk": self._num_dropped,
            "collector": 0 if self._export is None else self._export.num_dropped,
            "tail": self._consumers.num_dropped,
        }

    def new_id(self) -> int:
        """Return an id that is unique at this site, even across restarts."""
        self._last_id = max(self._last_id + 1, time.time_ns())
        return self._last_id

    def keep(self, row: InvocationRow) -> None:
        if self._has_room(row.what, row.error, row.detail):
            self._rows.append(row)
        if self._export is not None:
            self._export.invocation(row)

    def keep_line(self, function: str, version: str, id: int, level: str, text: str) -> None:
        """Store a line of output; `id` is 0 if it belongs to no request."""
        if not self.keeps:
            return
        now = time.time()
        if id == 0:
            id = self._loose.get((function, version), 0) or self.new_id()
            if (function, version) not in self._loose:
                self._loose[function, version] = id
                self._rows.append(InvocationRow(id, function, version, now, 0.0, 0.0, "process", OUTSIDE, None, "ok"))
        if self._has_room(text):
            self._lines.append(LineRow(id, now, level, text))
        if self._export is not None:
            self._export.line(function, version, id, now, level, text)

    def send_later(self, deliver: Callable[[TailConsumers], None]) -> None:
        """Deliver to tail consumers at the second flush from now: output may arrive after the response."""
        self._ended.append(lambda: deliver(self._consumers))

    async def find(self, query: LogQuery) -> list[LoggedInvocation]:
        """Return the stored invocations that match. Raises sqlite3.Error and DatabaseError."""
        if self._store is None:
            return []
        await self.flush()
        return await self._store.find(query)

    async def run(self) -> None:
        """Write and deliver ended invocations once a second, until cancelled."""
        trimmed_at = float("-inf")
        ready: list[Callable[[], None]] = []
        while True:
            await asyncio.sleep(FLUSH_S)
            for deliver in ready:
                deliver()
            ready, self._ended = self._ended, []
            await self.flush()
            if self._store is not None and time.monotonic() - trimmed_at > TRIM_S:
                trimmed_at = time.monotonic()
                await self._guarded(self._store.trim())

    async def flush(self) -> None:
        rows, lines, num_bytes = self._rows, self._lines, self._batch_bytes
        self._rows, self._lines, self._loose, self._batch_bytes = [], [], {}, 0
        if num_new := self._num_dropped - self._num_reported:
            log.warning("%d records of functions' logs were dropped: the disk does not keep up", num_new)
            self._num_reported = self._num_dropped
        if self._store is not None and (rows or lines):
            try:
                await self._guarded(self._store.write(rows, lines))
            finally:
                self._unwritten_bytes -= num_bytes

    async def close(self) -> None:
        await self._consumers.close()
        await self.flush()
        if self._store is not None:
            await self._store.close()
        if self._export is not None:
            await asyncio.to_thread(self._export.close)

    def _has_room(self, *texts: str) -> bool:
        """Return whether a record with these texts can be stored, and count it as unwritten or as dropped."""
        if self._store is None:
            return False
        num_bytes = ROW_BYTES + sum(map(sys.getsizeof, texts))
        if self._unwritten_bytes + num_bytes > self._max_bytes:
            self._num_dropped += 1
            return False
        self._unwritten_bytes += num_bytes
        self._batch_bytes += num_bytes
        return True

    async def _guarded(self, work: Awaitable[None]) -> None:
        """Await work on the store. A failure is logged and costs records, but never fails a request."""
        try:
            await work
        except (sqlite3.Error, DatabaseError) as error:
            log.warning("functions' logs cannot be written: %s", error)


class FunctionJournal:
    """The recorder of one version's invocations."""

    def __init__(self, log: InvocationLog, manifest: Manifest, version: str) -> None:
        self._log = log
        self._function = manifest.name
        self._version = version
        self._consumers = manifest.tail_consumers
        self._sampling = manifest.log_sampling
        self._open: dict[int, Invocation] = {}  # open invocations whose output is kept for tail consumers

    def begin(self, event: frames.FunctionEvent) -> Invocation:
        """Start the record of an invocation; if sampled, it is stored at its end."""
        consumers = (
            () if isinstance(event, frames.TailEvent) else self._consumers
        )  # a tail consumer's own invocations are not sent to tail consumers, which avoids loops
        id = self._log.new_id()
        is_kept = self._log.keeps and random.random() < self._sampling
        invocation = Invocation(id if is_kept else -id, event, self._ended, wants_lines=bool(consumers))
        if consumers:
            self._open[invocation.id] = invocation
        return invocation

    def printed(self, id: int, level: str, text: str) -> None:
        """Record a line of output. `id` is the invocation's, or 0 if it belongs to none."""
        if id > 0 or (id == 0 and self._sampling):
            self._log.keep_line(self._function, self._version, id, level, text)
        if (invocation := self._open.get(id)) is not None and len(invocation.printed) <= MAX_LINES:
            invocation.printed.append((time.time(), level, text))

    def _ended(self, invocation: Invocation) -> None:
        if invocation.id > 0:
            wall_ms, cpu_ms = round(invocation.wall_s * 1000, 3), round(invocation.cpu_s * 1000, 3)
            what = invocation.trigger, invocation.what, invocation.status
            became = invocation.outcome, invocation.error, invocation.detail
            of = invocation.id, self._function, self._version
            self._log.keep(InvocationRow(*of, invocation.started_s, wall_ms, cpu_ms, *what, *became))
        if invocation.id in self._open:
            self._log.send_later(lambda consumers: self._send(invocation, consumers))

    def _send(self, invocation: Invocation, consumers: TailConsumers) -> None:
        del self._open[invocation.id]
        item = trace_item(invocation, self._function, self._version)
        for consumer in self._consumers:
            consumers.send(consumer, item)

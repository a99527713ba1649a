"""The ledger: records each request's tokens once, even if its site, router or disk fails.

The router counts, because it alone sees a request once: across retries, and sites that die under a stream. A
token is counted before it is sent (wire/hop/meters.py), so the ledger never has fewer tokens than clients; and only tokens that a site has reported
are counted, so it never has tokens that no engine produced. A thread writes ended requests in batches (ledger_store.py), and a meter is kept until
its record is written: while the store cannot be written nothing is lost, and the configuration decides whether new requests are refused or served as
long as there are meters. A store that does not answer counts as one that cannot be written.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery, UsageStore, UsageStoreError, configured
from pilotlight.edge_router.metering.ledger.prices import PriceList
from pilotlight.edge_router.metering.ledger.sqlite_store import SqliteStore
from pilotlight.edge_router.requests.request import ValidRequest
from pilotlight.sites.config import ConfigError
from pilotlight.sites.network import LedgerConfig
from pilotlight.support.time_limits import done_within
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.meters import FILE_NAME, MeterFile, MetersError, MeterSlot
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, Outcome, UsageRecord

BATCH = 2000  # records written at once, in far less time than `answers_within_s`
NOTHING = ResourceUse()

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")

log = logging.getLogger("pilotlight.ledger")


class LedgerTimings(NamedTuple):
    write_every_s: float = 0.1
    try_again_s: float = 1.0  # interval of attempts while the store cannot be written
    answers_within_s: float = 10.0  # longest wait for any answer of the store


class Ledger:
    """The ledger of a router. Run `run()` as a task, and `close()` after it."""

    def __init__(
        self,
        config: LedgerConfig,
        directory: Path,
        prices: PriceList,
        clock: Callable[[], float] = time.time,
        timings: LedgerTimings | None = None,
        abandoned: Sequence[Path] = (),
        store: UsageStore | None = None,
    ) -> None:
        """Open the configured store, unless one is given.

        `clock` returns seconds since the epoch. `abandoned` are folders of meters that earlier processes have left, whose records are written, too.
        Raises ConfigError.
        """
        self.prices = prices
        self.fault: str | None = None  # why the store cannot be written
        self._config, self._timings = config, timings or LedgerTimings()
        self._clock = clock
        self._ended: list[_Unwritten] = []
        self._wake = asyncio.Event()
        # a record's id is a random string of this process, followed by a number
        self._start, self._numbers = os.urandom(12).hex(), count(1)
        self._thread = ThreadPoolExecutor(1, "ledger")
        self._writing = asyncio.Lock()
        self._store = _store(config, directory) if store is None else store
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._meters = MeterFile(directory / FILE_NAME, config.max_unwritten)
        except (OSError, MetersError) as error:
            raise ConfigError(f"ledger.directory {directory} cannot be used: {error}") from None
        self._files = [self._meters, *_opened(abandoned)]
        self.recovered: list[UsageRecord] = []  # open requests of a killed router
        for meters in self._files:
            for number, record in meters.left_behind():
                is_recovered = record.outcome == "recovered"
                is_sent_again = is_recovered and record.request.is_sent_again
                if is_recovered and not is_sent_again:
                    self.recovered.append(record)
                if is_sent_again or record.use == NOTHING:
                    meters.free(number)
                else:
                    self._ended.append(_Unwritten(meters, number, record))
        self._begin_store()

    @property
    def num_unwritten(self) -> int:
        return len(self._ended)

    def used_since(self, from_s: float) -> list[dict[str, Any]]:
        """Return the sums of accounts since a time, and the unwritten records, at a router's start.

        An account may occur several times. The sums are missing if the store cannot be read.
        """
        unwritten = [each.record for each in self._ended]
        waiting = [_sums_of(self._priced(one)) for one in unwritten if one.request.started_s >= from_s]
        try:
            return waiting + self._store.usage(UsageQuery(from_s, by=("account",)))
        except UsageStoreError as error:
            log.error("today's usage is known only in part: %s", error)
            return waiting

    def begin(self, request: ValidRequest, model: str, adapter: str = "") -> MeterSlot:
        """Return a meter for a request. Raises ApiError if all meters are in use,
        or if the ledger is failing and the configuration refuses requests then."""
        if self.fault is not None and self._config.when_failing == "refuse":
            raise _failing()
        holder = request.head.holder
        account, key = ("", "") if holder is None else (holder.account.name, holder.name)
        # A request that another router repeats after a kill keeps its id, so that it is recorded once.
        is_sent_again = bool(request.head.usage_id)
        name = request.head.usage_id or f"{self._start}.{next(self._numbers)}"
        known = (name, request.request_id, account, key, model, self._clock())
        entry = MeteredRequest(*known, adapter=adapter, bytes_in=len(request.body), is_sent_again=is_sent_again)
        meter = self._meters.begin(entry)
        if meter is None:
            raise _failing()
        return meter

    def end(self, meter: MeterSlot, outcome: Outcome, took_s: float) -> None:
        """End the record of a request. `took_s` is a measured duration, because the wall clock may jump."""
        if meter.use == NOTHING:  # refused, or without usage
            return self._meters.free(meter.number)
        ended_s = meter.request.started_s + took_s
        self._meters.end(meter.number, outcome, ended_s)
        record = UsageRecord(meter.request, meter.site, ended_s, outcome, meter.use, meter.bytes_out)
        self._ended.append(_Unwritten(self._meters, meter.number, record))
        self._wake.set()

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(self._timings.write_every_s if self.fault is None else self._timings.try_again_s)
            await self.flush()

    async def flush(self) -> None:
        """Write ended requests, in the ledger's thread."""
        async with self._writing:
            self._wake.clear()
            for _ in range(0, len(self._ended), BATCH):
                await self._write(tuple(self._ended[:BATCH]))
                if self.fault is not None:
                    return

    async def _write(self, batch: tuple["_Unwritten", ...]) -> None:
        try:
            await self._answered(self._add, batch)
        except UsageStoreError as error:
            self._wake.set()
            if self.fault is None:
                log.error("usage cannot be written now and is kept in meters: %s", error)
            self.fault = str(error)
        else:
            if self.fault is not None:
                log.warning("usage is written again; %d records were waiting", len(self._ended))
            self.fault = None
            self._settle(batch)

    async def add(self, records: Sequence[UsageRecord]) -> None:
        """Write usage records of sites, each once, even if it is received repeatedly. Raises UsageStoreError."""
        async with self._writing:
            await self._answered(self._store.add, [self._priced(record) for record in records])

    async def identity(self) -> str:
        """Return the unique name of the store's contents. Raises UsageStoreError."""
        return await self._answered(lambda _: self._store.identity(), None)

    async def usage(self, query: UsageQuery) -> list[dict[str, Any]]:
        """Return sums that include all ended requests. Raises ApiError if the store fails."""
        await self.flush()
        try:
            return await self._answered(self._store.usage, query)
        except UsageStoreError as error:
            raise ApiError("overloaded", f"the ledger cannot be read: {error}", retry_after_s=5) from None

    async def close(self) -> None:
        """Write everything possible; the rest stays in its meters, for the next router."""
        await self.flush()
        self._thread.shutdown()
        self._store.close()
        self._close_meters()

    async def _answered(self, ask: Callable[[Asked], Answer], asked: Asked) -> Answer:
        """Return the store's answer. Raises UsageStoreError if the store fails or is late."""
        work = asyncio.get_running_loop().run_in_executor(self._thread, ask, asked)
        if not await done_within(self._timings.answers_within_s, work):
            self._store.interrupt()
        return await work

    def _begin_store(self) -> None:
        """Write records that the previous router left. Raises ConfigError."""
        try:
            self._add(tuple(self._ended))
        except UsageStoreError as error:
            if self._config.when_failing == "refuse":
                self._close_meters()
                raise ConfigError(f"the ledger's store cannot be written: {error}") from None
            log.error("usage cannot be written now and is kept in meters: %s", error)
            self.fault = str(error)
            self._wake.set()
        else:
            self._settle(tuple(self._ended))

    def _add(self, batch: tuple["_Unwritten", ...]) -> None:
        self._store.add([self._priced(each.record) for each in batch])

    def _settle(self, batch: tuple["_Unwritten", ...]) -> None:
        del self._ended[: len(batch)]
        for each in batch:
            each.meters.free(each.number)

    def _close_meters(self) -> None:
        for meters in self._files:
            meters.close()

    def _priced(self, record: UsageRecord) -> UsageRecord:
        return replace(record, cost=self.prices.cost(record.request.model, record.request.started_s, record.use))


class _Unwritten(NamedTuple):
    """An ended request that is not written yet: its record, and its meter's file and number."""

    meters: MeterFile
    number: int
    record: UsageRecord


def _opened(folders: Sequence[Path]) -> Iterator[MeterFile]:
    """Yield the meters in these folders, except those that another process uses or that are damaged."""
    for folder in folders:
        try:
            yield MeterFile(folder / FILE_NAME, 0)
        except (OSError, MetersError) as error:
            log.error("the usage in %s is not written: %s", folder, error)


def _sums_of(record: UsageRecord) -> dict[str, Any]:
    """Return a record in the form in which the store sums it."""
    use = record.use
    return {
        "account": record.request.account, "prompt_tokens": use.prompt, "output_tokens": use.output, "cost": record.cost,
    }  # fmt: skip


def _store(config: LedgerConfig, directory: Path) -> UsageStore:
    """Return the configured store. Raises ConfigError."""
    if config.store is None:
        return SqliteStore(directory / "usage.sqlite")
    return configured("ledger.store", partial(_postgres, config.store))


def _postgres(url: str) -> UsageStore:
    from pilotlight.edge_router.metering.ledger.postgres_store import PostgresStore

    return PostgresStore(url)


def _failing() -> ApiError:
    return ApiError("overloaded", "usage cannot be recorded right now; retry later", retry_after_s=5)

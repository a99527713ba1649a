"""Usage of functions at this site, kept until a router's ledger has recorded it.

It counts the functions' model calls and the CPU time of their processes, which routers do not see.

Counts are in a mapped file (wire/hop/meters.py), and tokens are counted before the function gets them, so that a killed site loses nothing.
Routers poll for finished records (wire/hop/usage_records.py). A record is assigned to the first ledger that gets it, because that ledger may have
stored it. Another ledger gets the record only if the first has not polled for a day. The file is created when a ledger polls for the first time.
While all meters are in use, model calls of functions are refused, so that no usage is lost.
"""

import os
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

from msgspec.structs import replace

from pilotlight.sites.config import ConfigError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.meters import MeterFile, MetersError, MeterSlot
from pilotlight.wire.hop.usage import ResourceUse
from pilotlight.wire.hop.usage_records import MeteredRequest, Outcome, UsageAsked, UsageRecord, UsageTold

MAX_UNWRITTEN = 16_384  # finished and running records, 1 KiB each
BATCH = 1000
CPU_RECORD_S = 10.0  # period after which a function's CPU time becomes a record
GONE_S = 86_400.0  # a ledger that has not polled for this long counts as gone
NOTHING = ResourceUse()


class FunctionUsage:
    def __init__(
        self,
        directory: Path,
        site: str,
        account_of: Callable[[str], str],
        clock: Callable[[], float] = time.time,
        max_unwritten: int = MAX_UNWRITTEN,
        is_limited: Callable[[str], bool] = lambda function: False,
    ) -> None:
        """`account_of` maps a function to its account; `clock` returns the Unix time in seconds.
        `is_limited` tells whether a function's calls to models go through the router, which then records them.
        Raises ConfigError if the file cannot be used."""
        self._path = directory / "function-usage"
        self._site = site
        self.account_of = account_of
        self.is_limited = is_limited
        self._clock = clock
        self._max_unwritten = max_unwritten
        # a record's id consists of a random name for this start of the site, and a number
        self._start, self._numbers = os.urandom(12).hex(), count(1)
        self._meters: MeterFile | None = None
        self._ended: dict[
            str, tuple[int, UsageRecord]
        ] = {}  # (meter's number, finished record) by the record's id; the record's `site` is the ledger that got it
        self._asked_s: dict[str, float] = {}  # time of each ledger's last poll
        self._cpu: dict[str, MeterSlot] = {}  # CPU meter of each function
        self._opened_s = clock()
        if self._path.exists():
            self._open()

    def begin(self, function: str, model: str, adapter: str = "", bytes_in: int = 0) -> MeterSlot | None:
        """Return a meter for a function's call of a model; None if no ledger has ever polled.
        Raises ApiError if no meter is free."""
        if self._meters is None:
            return None
        meter = self._new_meter(function, model, adapter, bytes_in)
        if meter is None:
            sentence = "usage of functions cannot be recorded right now: try again later"
            raise ApiError("overloaded", sentence, retry_after_s=5)
        return meter

    def end(self, meter: MeterSlot | None, outcome: Outcome) -> None:
        if meter is None or self._meters is None:
            return
        if meter.use == NOTHING and not meter.cpu_us:
            return self._meters.free(meter.number)
        ended_s = self._clock()
        self._meters.end(meter.number, outcome, ended_s)
        known = meter.request, "", ended_s, outcome, meter.use, meter.bytes_out
        self._ended[meter.request.id] = meter.number, UsageRecord(*known, cpu_us=meter.cpu_us)

    def computed(self, function: str, cpu_s: float) -> None:
        """Add CPU time of a function's processes."""
        meter = self._cpu.get(function)
        if meter is None and (meter := self._new_meter(function, "", "", 0)) is not None:
            self._cpu[function] = meter
        if meter is not None:
            meter.computes(round(cpu_s * 1e6))

    def hand_out(self, asked: UsageAsked) -> UsageTold:
        """Return the next finished records for a ledger, and delete the records that it reports as stored."""
        if self._meters is None:
            self._open()
        assert self._meters is not None
        now_s = self._clock()
        self._asked_s[asked.ledger] = now_s
        for id in asked.written:
            if (found := self._ended.pop(id, None)) is not None:
                self._meters.free(found[0])
        for function, meter in [*self._cpu.items()]:
            if now_s >= meter.request.started_s + CPU_RECORD_S:
                self.end(self._cpu.pop(function), "complete")
        handed = []
        for id, (number, record) in [*self._ended.items()]:
            if record.site != asked.ledger:
                if not self._may_take(record.site, now_s):
                    continue
                self._meters.set_site(number, asked.ledger)
                self._ended[id] = number, replace(record, site=asked.ledger)
            handed.append(replace(record, site=self._site))
            if len(handed) == BATCH:
                break
        return UsageTold(tuple(handed))

    def close(self) -> None:
        if self._meters is not None:
            for function in [*self._cpu]:
                self.end(self._cpu.pop(function), "complete")
            self._meters.close()
            self._meters = None

    def _may_take(self, ledger: str, now_s: float) -> bool:
        """Tell whether another ledger may get the records that were assigned to `ledger`; "" means no ledger."""
        return not ledger or now_s >= self._asked_s.get(ledger, self._opened_s) + GONE_S

    def _new_meter(self, function: str, model: str, adapter: str, bytes_in: int) -> MeterSlot | None:
        if self._meters is None:
            return None
        id = f"{self._start}.{next(self._numbers)}"
        account = self.account_of(function)
        known = MeteredRequest(id, id, account, "", model, self._clock(), adapter, bytes_in, function)
        return self._meters.begin(known)

    def _open(self) -> None:
        """Open the file and load the records that an earlier process left. Raises ConfigError."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._meters = MeterFile(self._path, self._max_unwritten)
        except (OSError, MetersError) as error:
            raise ConfigError(f"usage of functions cannot be counted in {self._path}: {error}") from None
        for number, record in self._meters.left_behind():
            if record.use == NOTHING and not record.cpu_us:
                self._meters.free(number)
            else:
                self._ended[record.request.id] = number, record

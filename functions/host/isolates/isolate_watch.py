"""Measures one isolate from outside: CPU time, memory, and how long its event loop is silent.

CPU time is charged to the isolate's open work. The watch reports which limit is exceeded; the handle ends the isolate. The measurement needs no
cooperation of the function, because code in an endless loop would give none.
"""

import time
from collections.abc import Callable

from pilotlight.functions.host.isolates.isolate_process import IsolateProcess
from pilotlight.functions.host.isolates.isolate_work import CpuMeter, IsolateWork
from pilotlight.functions.host.isolates.loop_probe import LoopProbe, Ping
from pilotlight.functions.sandbox.limits import FunctionLimits, IsolateUsage, first_exceeded
from pilotlight.support.time_limits import NO_PAUSES, Pauses

Exceeded = tuple[str, str]
"""The sentence for the author, and the error code."""


class IsolateWatch:
    def __init__(
        self,
        limits: FunctionLimits,
        process: IsolateProcess,
        work: IsolateWork,
        clock: Callable[[], float] = time.monotonic,
        pauses: Pauses = NO_PAUSES,
    ) -> None:
        self.probe = LoopProbe(clock)
        self._clock, self._pauses = clock, pauses
        self._limits = limits
        self._process = process
        self._work = work
        self._importing_since = self._clock()
        self._meter = CpuMeter(work, limits.sockets_share, self._importing_since)
        self._looked_at = 0.0

    @property
    def total_s(self) -> float:
        """CPU time of the isolate's whole life, at the last measurement."""
        return self._meter.total_s

    def last_look(self) -> None:
        """Measure before the isolate is ended, because it cannot be measured afterwards."""
        self._spent()

    def begin_import(self) -> None:
        self._importing_since = self._clock()

    def begin(self) -> None:
        """Charge the requests that have waited for the import from now on, but not for the import."""
        self._spent()
        self._meter.charge(0.0, self._clock())

    @property
    def is_spent(self) -> bool:
        """Tell whether the isolate has used so much CPU time that it should be replaced."""
        return self._meter.total_s > self._limits.cpu_total_s

    def charge(self) -> None:
        """Charge the CPU time since the last measurement to the open work.
        Called when a request starts or ends, so that a short request pays only for itself."""
        now = self._clock()
        spent_s = self._spent()
        self._process.history.spent(spent_s, now)
        self._meter.charge(spent_s, now)

    def look_at_start(self) -> Exceeded | None:
        now = self._clock()
        self._spent()  # not charged to requests, because an import may take long
        if self._pauses.silent_s(self._importing_since, now) > self._limits.start_s:
            return f"its module was not imported within {self._limits.start_s:g} s", "start_time"
        return None

    def look(self, ping: Ping) -> Exceeded | None:
        """Check an isolate with open work. Return the exceeded limit, or None."""
        self.charge()
        self._process.update_priority()
        exceeded = first_exceeded(self._usage(), self._limits)
        if exceeded is None and not self.is_spent:
            self.probe.begin(ping)
        return exceeded

    def look_idle(self) -> Exceeded | None:
        """Check an idle isolate without waking it: the author may have left threads or tasks running."""
        now = self._clock()
        if now - self._looked_at < self._limits.idle_look_s:
            return None
        self._looked_at = now
        spent_s = self._spent()
        self._process.history.spent(spent_s, now)
        self._process.update_priority()
        self._meter.charge_idle(spent_s)
        return first_exceeded(IsolateUsage(idle_cpu_s=self._meter.idle_s), self._limits)

    def _spent(self) -> float:
        """Return the CPU seconds since the last measurement."""
        return self._meter.spent(self._process.cpu_s())

    def _usage(self) -> IsolateUsage:
        now = self._clock()
        awake_s = self._pauses.silent_s(float("-inf"), now)  # since this process was last stopped
        return IsolateUsage(
            idle_cpu_s=self._meter.idle_s,
            request_cpu_s=max(self._work.requests.values(), default=0.0),
            sockets_cpu_s=self._meter.sockets_s,
            memory_mib=self._process.memory_mib(),
            silent_s=min(self.probe.silent_s(), awake_s),
            background_s=min(self._work.background_s(), awake_s),
        )

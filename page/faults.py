"""Faults of sites in the last day.

They are found by comparing two readings, a second apart."""

from collections import deque
from collections.abc import Iterable

import msgspec

from pilotlight.page.source import SiteRow

KEPT, KEPT_S = 500, 86_400.0


class SiteFault(msgspec.Struct):
    at_s: float
    site: str
    what: str
    cause: str = ""
    until_s: float | None = None  # time of its end; None while it lasts


class Faults:
    def __init__(self) -> None:
        self._kept: deque[SiteFault] = deque(maxlen=KEPT)
        self._rows: dict[str, SiteRow] = {}
        self._open: dict[tuple[str, str], SiteFault] = {}

    def note(self, at_s: float, rows: Iterable[SiteRow]) -> None:
        """Record the faults that started or ended since the last reading."""
        for row in rows:
            before = self._rows.get(row.name)
            self._rows[row.name] = row
            if row is before:
                continue
            self._lasting(
                at_s, row, "", "cannot be reached or is not ready" if row.state == "unhealthy" else "", row.detail
            )
            for model in row.models:
                failed = f"{model.name} could not be loaded" if model.residency == "failed" else ""
                self._lasting(at_s, row, model.name, failed, model.detail)
            if before is not None:
                self._replaced(at_s, before, row)

    def newest(self, now_s: float) -> list[SiteFault]:
        """Return the faults of the last day, the newest first."""
        return [fault for fault in reversed(self._kept) if now_s - (fault.until_s or fault.at_s) < KEPT_S]

    def _lasting(self, at_s: float, row: SiteRow, subject: str, what: str, cause: str) -> None:
        """Record the start of a fault, or its end if `what` is empty."""
        key = (row.name, subject)
        fault = self._open.get(key)
        if what and fault is None:
            self._open[key] = fault = SiteFault(at_s, row.name, what)
            self._kept.append(fault)
        if what and fault is not None:
            fault.cause = cause or fault.cause
        elif fault is not None:
            fault.until_s = at_s
            del self._open[key]

    def _replaced(self, at_s: float, before: SiteRow, row: SiteRow) -> None:
        was, now = ({one.device: one.pid for one in each.processes if one.role == "engine"} for each in (before, row))
        if row.uptime_s < before.uptime_s:
            self._kept.append(SiteFault(at_s, row.name, "was restarted", until_s=at_s))
            return
        for device, pid in now.items():
            if (old := was.get(device)) is not None and old != pid:
                self._kept.append(
                    SiteFault(at_s, row.name, f"the engine host on {device} was replaced", f"process {old} ended", at_s)
                )

"""Service-level objectives: the shares of a model's requests that succeed and start in time."""

import asyncio
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric

from pilotlight.edge_router.forwarding.downstream import DownstreamGone
from pilotlight.edge_router.forwarding.request_state import RequestState
from pilotlight.sites.network import ObjectiveConfig
from pilotlight.support.database import claim_version
from pilotlight.wire.errors import ApiError

BUCKET_S = 300
WRITE_EVERY_S = 10.0
DAY_S = 86_400
PERIOD_DAYS = 30  # period of a budget
WINDOWS = {"1h": 3600, "6h": 6 * 3600, "3d": 3 * DAY_S}
ALL_SITES = "*"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    bucket INTEGER NOT NULL, model TEXT NOT NULL, site TEXT NOT NULL,
    answers INTEGER NOT NULL, failed INTEGER NOT NULL, streams INTEGER NOT NULL, late INTEGER NOT NULL,
    PRIMARY KEY (bucket, model, site)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO requests VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    answers = answers + excluded.answers, failed = failed + excluded.failed, streams = streams + excluded.streams, late = late + excluded.late
"""
_SUMS = "SELECT model, site, SUM(answers), SUM(failed), SUM(streams), SUM(late) FROM requests WHERE bucket >= ? GROUP BY 1, 2"

log = logging.getLogger(__name__)


class JudgedRequests(NamedTuple):
    """Numbers of requests. `late` counts those of `streams` whose first token came too late."""

    answers: int = 0  # answers and failures
    failed: int = 0
    streams: int = 0
    late: int = 0

    def plus(self, other: "JudgedRequests") -> "JudgedRequests":
        return JudgedRequests(*(one + more for one, more in zip(self, other, strict=True)))


class ObjectiveState(NamedTuple):
    """One objective at one site. Shares are from 0 to 1."""

    model: str  # the model's name in the file
    site: str  # "*" for all sites together; empty for requests that no site answered
    objective: str  # `answered` or `first_token`
    target: float
    within_ms: float | None  # limit of the time to first token
    requests: int  # requests in the period
    bad: int
    burn_rate: dict[str, float | None]  # window -> burn rate; None for a window without requests
    budget_left: float  # below zero if more requests were bad than the period allows


class Objectives:
    """The objectives of a router, a Prometheus collector. Run `run()` as a task, and `close()` after it."""

    def __init__(
        self, configs: Sequence[ObjectiveConfig], path: Path | None, clock: Callable[[], float] = time.time
    ) -> None:
        """`path` is the file of counts; None to keep them in memory.
        `clock` returns seconds since the epoch. Raises sqlite3.Error, DatabaseError."""
        self._configs = configs
        self._clock = clock
        self._unwritten: defaultdict[tuple[int, str, str], JudgedRequests] = defaultdict(JudgedRequests)
        self._states: list[ObjectiveState] = []  # states at the last write of the counts
        self._fault: str | None = None
        self._thread = ThreadPoolExecutor(1, "objectives")
        self._connection = sqlite3.connect(path or ":memory:", check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        claim_version(self._connection)
        self._connection.execute(_SCHEMA)
        with self._connection:
            # Counts are kept for twice the period, so that a start with a clock that is ahead does not delete those still needed.
            oldest = self._bucket(2 * PERIOD_DAYS * DAY_S)
            self._connection.execute("DELETE FROM requests WHERE bucket < ?", (oldest,))

    def count(self, proxied: RequestState, model: str, error: BaseException | None, took_s: float) -> None:
        """Count an ended request with its error. `model` is its own name, not an alias.
        Errors of clients are not counted, nor are clients that left early."""
        config = next((each for each in self._configs if fnmatchcase(model, each.model)), None)
        if config is None:
            return
        limit_s = float("inf") if config.first_token_ms is None else config.first_token_ms / 1000
        first_s = proxied.first_token_s
        has_failed, has_left = _has_failed(proxied, error), _has_left(error)
        if not has_failed and (proxied.status >= 400 or isinstance(error, ApiError)):
            return
        if has_left and proxied.status == 0 and not (proxied.request.wants_stream and took_s > limit_s):
            return
        is_stream = first_s is not None or (proxied.request.wants_stream and has_left)
        is_late = is_stream and (took_s if first_s is None else first_s) > limit_s
        site = proxied.recovery.lost_site if has_failed and proxied.recovery.lost_site else proxied.site
        key = self._bucket(0), config.model, site
        self._unwritten[key] = self._unwritten[key].plus(JudgedRequests(1, has_failed, is_stream, is_late))

    async def run(self) -> None:
        while True:
            await self.states()
            await asyncio.sleep(WRITE_EVERY_S)

    async def states(self) -> list[ObjectiveState]:
        """Write the counts, and return the state of each objective, for all sites together and for each site."""
        counts, self._unwritten = self._unwritten, defaultdict(JudgedRequests)
        try:
            loop = asyncio.get_running_loop()
            self._states = await loop.run_in_executor(self._thread, self._write_and_read, counts)
            self._fault = None
        except sqlite3.Error as error:
            for key, served in counts.items():
                self._unwritten[key] = self._unwritten[key].plus(served)
            if self._fault is None:
                log.error("counts of objectives cannot be written now and are kept in memory: %s", error)
            self._fault = str(error)
        return self._states

    async def close(self) -> None:
        await self.states()
        self._thread.shutdown()
        self._connection.close()

    def collect(self) -> Iterator[Metric]:
        about = "Share of bad requests divided by the share that the objective allows."
        burn = GaugeMetricFamily(
            "pilotlight_router_slo_burn_rate", about, labels=["model", "site", "objective", "window"]
        )
        about = "Remaining share of the error budget of 30 days."
        left = GaugeMetricFamily("pilotlight_router_slo_budget_left", about, labels=["model", "site", "objective"])
        for state in self._states:
            labels = [state.model, state.site, state.objective]
            left.add_metric(labels, state.budget_left)
            for window, rate in state.burn_rate.items():
                if rate is not None:
                    burn.add_metric([*labels, window], rate)
        yield from (burn, left)

    def _bucket(self, ago_s: float) -> int:
        return int(self._clock() - ago_s) // BUCKET_S

    def _write_and_read(self, counts: dict[tuple[int, str, str], JudgedRequests]) -> list[ObjectiveState]:
        with self._connection:
            self._connection.executemany(_ADD, [(*key, *served) for key, served in counts.items()])
        windows = {name: self._since(seconds) for name, seconds in WINDOWS.items()}
        return list(_states(self._configs, self._since(PERIOD_DAYS * DAY_S), windows))

    def _since(self, seconds: int) -> dict[tuple[str, str], JudgedRequests]:
        found: defaultdict[tuple[str, str], JudgedRequests] = defaultdict(JudgedRequests)
        for model, site, *numbers in self._connection.execute(_SUMS, (self._bucket(seconds),)):
            for each in (site, ALL_SITES):
                found[model, each] = found[model, each].plus(JudgedRequests(*numbers))
        return found


Sums = dict[tuple[str, str], JudgedRequests]  # (objective's model, site) -> numbers of requests


def _states(configs: Sequence[ObjectiveConfig], period: Sums, windows: dict[str, Sums]) -> Iterator[ObjectiveState]:
    for config in configs:
        sites = sorted({site for model, site in period if model == config.model} | {ALL_SITES})
        for site in sites:
            for name, target, within_ms in (
                ("answered", config.answered, None),
                ("first_token", config.first_token, config.first_token_ms),
            ):
                if target is None:
                    continue
                requests, bad = _judged(period, config.model, site, name)
                rates = {
                    window: _burn_rate(*_judged(sums, config.model, site, name), target)
                    for window, sums in windows.items()
                }
                left = 1.0 - (_burn_rate(requests, bad, target) or 0.0)
                yield ObjectiveState(config.model, site, name, target, within_ms, requests, bad, rates, left)


def _judged(sums: Sums, model: str, site: str, objective: str) -> tuple[int, int]:
    """Return how many requests an objective judges, and how many of them were bad."""
    served = sums.get((model, site), JudgedRequests())
    return (served.answers, served.failed) if objective == "answered" else (served.streams, served.late)


def _burn_rate(requests: int, bad: int, target: float) -> float | None:
    return bad / requests / (1.0 - target) if requests else None


def _has_failed(proxied: RequestState, error: BaseException | None) -> bool:
    if isinstance(error, ApiError):
        return error.kind.status >= 500
    if error is not None:
        return not _has_left(error)
    return not proxied.is_complete or proxied.status >= 500


def _has_left(error: BaseException | None) -> bool:
    return isinstance(error, (DownstreamGone, asyncio.CancelledError))


def slo_answer(states: Sequence[ObjectiveState]) -> dict[str, Any]:
    """Return the answer of GET /slo."""
    return {"period_days": PERIOD_DAYS, "objectives": [state._asdict() for state in states]}

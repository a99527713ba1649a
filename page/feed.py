"""Server-sent events with a sample of each second. The source is read once for all open pages."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import orjson

from pilotlight.page.faults import Faults, SiteFault
from pilotlight.page.history import History, Sample
from pilotlight.page.source import Decision, Move, Source

SITES_A_SECOND = 100  # with N times as many sites, rows are sent every N seconds; 330 rows take about 400 kB
RETRY_MS = 1000


class Feed:
    """The page's feed, which reads the source once a second.

    It also does so while no page is open, so that the history is complete.
    """

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        self.history = History()
        self.faults = Faults()
        self._source = source
        self._clock = clock
        self._second = 0
        self._event = b""
        self._rows: dict[str, bytes] = {}  # rows of sites as they were last sent
        self._last_move = self._last_decision = 0
        self._next: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Take a sample every second, until cancelled."""
        while True:
            self.tick()
            await asyncio.sleep(1.0)

    def tick(self) -> None:
        """Take a sample, and wake the pages that wait for it."""
        at = self._clock()
        sample = self.history.note(at, self._source.counts())
        self._second += 1
        changed, gone = self._changes()
        moves = [move for move in self._source.moves() if move.number > self._last_move]
        decisions = [one for one in self._source.decisions() if one.number > self._last_decision]
        self._last_move = moves[-1].number if moves else self._last_move
        self._last_decision = decisions[-1].number if decisions else self._last_decision
        self._event = self._encoded("second", at, sample, changed, gone, moves, decisions)
        if self._next is not None and not self._next.done():
            self._next.set_result(None)
        self._next = None

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the whole state, and then the changes of each second.
        A page that has missed a second gets the whole state again."""
        event, seen = self._whole(), self._second
        while True:
            yield event
            await self._until_next()
            event = self._event if self._second == seen + 1 else self._whole()
            seen = self._second

    def newest_faults(self) -> list[SiteFault]:
        return self.faults.newest(self._clock())

    async def _until_next(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._next)

    def _whole(self) -> bytes:
        rows = [msgspec.json.encode(row) for row in self._source.sites()]
        return self._encoded(
            "whole", self._clock(), None, rows, [], self._source.moves(), self._source.decisions(),
            name=self._source.name, place=msgspec.to_builtins(self._source.place), version=self._source.version,
        )  # fmt: skip

    def _changes(self) -> tuple[list[bytes], list[str]]:
        """Return the rows of sites that changed since they were last sent, and the names of removed sites."""
        rows = self._source.sites()
        self.faults.note(self._clock(), rows)
        if self._second % max(1, len(rows) // SITES_A_SECOND):
            return [], []
        changed: list[bytes] = []
        for row in rows:
            encoded = msgspec.json.encode(row)
            if self._rows.get(row.name) != encoded:
                self._rows[row.name] = encoded
                changed.append(encoded)
        gone = [*self._rows.keys() - {row.name for row in rows}]
        for name in gone:
            del self._rows[name]
        return changed, gone

    def _encoded(
        self,
        kind: str,
        at: float,
        sample: Sample | None,
        sites: list[bytes],
        gone: list[str],
        moves: "list[Move] | tuple[Move, ...]",
        decisions: "list[Decision] | tuple[Decision, ...]",
        **more: Any,
    ) -> bytes:
        data = {
            **more,
            "at": at,
            "sample": msgspec.to_builtins(sample),
            "sites": [orjson.Fragment(one) for one in sites],
            "gone": gone,
            "moves": msgspec.to_builtins(moves),
            "decisions": msgspec.to_builtins(decisions),
        }
        return b"retry: %d\nevent: %s\nid: %d\ndata: %s\n\n" % (
            RETRY_MS,
            kind.encode(),
            self._second,
            orjson.dumps(data),
        )

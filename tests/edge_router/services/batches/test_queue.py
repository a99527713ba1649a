"""The queue of batches: requests that cannot be answered, stored or read."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.services.batches.batch_store import BatchLimits, StoredBatch
from pilotlight.edge_router.services.batches.lines import AskedLine
from pilotlight.edge_router.services.batches.queue import BatchQueue
from pilotlight.edge_router.services.batches.sender import BatchAnswer
from pilotlight.support import background
from pilotlight.wire.credentials import Access
from tests.asgi import eventually
from tests.edge_router.builders import Clock, site_status

NOW_S = 1000  # the time at which the clock of builders.py starts


class Made:
    """A queue whose requests get one answer: a status, or none."""

    def __init__(self, folder: Path, status: int | None = 200, retry_after_s: float = 0.0) -> None:
        self.answer = status, retry_after_s
        self.num_cancelled = 0
        self.slept: list[float] = []
        view = SimpleNamespace(model=lambda name: name)
        site = SimpleNamespace(state="healthy", status=site_status(), outstanding=0, view=lambda: view)
        self.selector = SimpleNamespace(backends={"ams1": site})
        self.admission = SimpleNamespace(is_draining=False)
        access = Access((), is_required=False, clock=Clock())
        self.queue = BatchQueue(folder / "b.sqlite", cast("Any", self), access, BatchLimits(), Clock(), self.sleep)

    def forward(self, answer: BatchAnswer, body: bytes) -> BatchAnswer:
        return answer

    async def handle(self, client: BatchAnswer, work: BatchAnswer) -> None:
        status, client.retry_after_s = self.answer
        if status is not None:
            client.status = status
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if seconds >= 60:
            await asyncio.Event().wait()

    async def ask(self, left_s: float = 60) -> StoredBatch:
        """Store a batch of one request."""
        batch = StoredBatch("batch_1", "acme", "", "/v1/completions", "", NOW_S, cast("int", NOW_S + left_s))
        return await self.queue.do(self.queue.store.add, batch, [AskedLine("a", "ember", b"{}")])

    @asynccontextmanager
    async def running(self) -> AsyncIterator[BatchQueue]:
        try:
            async with background.running(self.queue.run, "batches"), asyncio.timeout(60):
                yield self.queue
        finally:
            await self.queue.close()


async def test_a_request_whose_batch_has_no_time_left_is_not_waited_for_and_frees_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Made(tmp_path, 503, retry_after_s=3600.0)
    await made.ask(left_s=0.05)
    with caplog.at_level("INFO", logger="pilotlight.batches"):
        async with made.running() as queue:
            await eventually(lambda: "was not answered in time" in caplog.text)
            await eventually(lambda: queue.under_way == ())


async def test_an_answer_is_kept_when_it_can_be(tmp_path: Path) -> None:
    made = Made(tmp_path)
    batch, store = await made.ask(), cast("Any", made.queue.store)
    faults, answered = [sqlite3.OperationalError("disk is full"), OSError("gone")], store.answered

    def failing_twice(*arguments: Any) -> None:
        if faults:
            raise faults.pop(0)
        answered(*arguments)

    store.answered = failing_twice
    async with made.running() as queue:
        while not (await queue.do(queue.store.counts, batch)).answered:
            await asyncio.sleep(0)
    assert made.slept == [5, 5]


async def test_a_stop_ends_what_is_under_way(tmp_path: Path) -> None:
    made = Made(tmp_path, None)
    await made.ask()
    async with made.running() as queue:
        await eventually(lambda: queue.under_way == (1,))
    assert made.num_cancelled == 1
    with pytest.raises(RuntimeError, match="shutdown"):
        await queue.do(queue.store.waiting)


async def test_an_owners_request_that_cannot_be_read_keeps_no_other_owner_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, asked = Made(tmp_path), list[str]()

    def next_waiting(owner: str, model: str, last: int) -> None:
        asked.append(owner)
        if owner == "acme":
            raise ValueError("a row of another version")

    cast("Any", made.queue.store).next_waiting = next_waiting
    for owner in ("acme", "bob"):
        made.queue.added(owner, {"ember"})
    async with made.running():
        await eventually(lambda: asked == ["acme", "bob"])
    assert "a row of another version" in caplog.text

"""The queue of batches alone: the key of each request, and requests that cannot be answered or stored."""

import asyncio
import json
import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.edge_router.requests.request import Head
from pilotlight.edge_router.services.batches import queue
from pilotlight.edge_router.services.batches.batch_store import StoredBatch, WaitingRequest
from pilotlight.edge_router.services.batches.queue import BatchAnswer, BatchQueue
from pilotlight.wire.credentials import Access, Account, Key
from pilotlight.wire.errors import ApiError
from tests.edge_router.builders import Clock, model_status, site_status

NOW_S = 1000  # the time at which the clock of builders.py starts
MINE = Key("mine", "0" * 64, account=Account("acme"))


def waiting(key: str = "mine", owner: str = "acme", left_s: int = 60) -> WaitingRequest:
    batch = StoredBatch("batch_1", owner, key, "/v1/chat/completions", "file-1", NOW_S, NOW_S + left_s)
    return WaitingRequest(1, b"{}", batch)


class Made:
    """A queue whose requests get `answers`, one after the other."""

    def __init__(self, folder: Path, *answers: tuple[int, float], keys: tuple[Key, ...] = (MINE,), door: bool = True):
        self.answers = list(answers)  # status and retry-after, in seconds, of each answer
        self.asked: list[BatchAnswer] = []
        access = Access(keys, is_required=door, clock=Clock())
        self.queue = BatchQueue(folder / "batches.sqlite", cast("Any", self), access, clock=Clock())

    def forward(self, answer: BatchAnswer, body: bytes) -> BatchAnswer:
        return answer

    async def handle(self, client: BatchAnswer, work: BatchAnswer) -> None:
        self.asked.append(client)
        client.status, client.retry_after_s = self.answers[len(self.asked) - 1]


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the list of seconds that a queue waits; no time passes."""
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(queue, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    return found


@pytest.mark.parametrize(
    ("answers", "status", "waits"),
    [
        ([(200, 0.0)], 200, []),
        ([(400, 0.0)], 400, []),
        ([(503, 0.0)] * 8 + [(200, 0.0)], 200, [1, 2, 4, 8, 16, 32, 60, 60]),
        ([(429, 5.0), (429, 1.0), (200, 0.0)], 200, [5, 2]),
        ([(500, 0.0)] * 3, 500, [1, 2]),
        ([(500, 0.0), (503, 0.0), (408, 0.0), (504, 0.0)], 504, [1, 2, 4]),
    ],
)
async def test_a_request_is_asked_again_with_ever_longer_pauses_and_seldom_where_sites_fail_at_it(
    tmp_path: Path, slept: list[float], answers: list[tuple[int, float]], status: int, waits: list[float]
) -> None:
    made = Made(tmp_path, *answers)
    assert (await made.queue._asked(waiting()))[0] == status
    assert slept == waits
    assert {each.request_id for each in made.asked} == {"batch_1.1"}, "billed once under its own name"
    await made.queue.close()


@pytest.mark.parametrize(
    ("keys", "door", "key", "refusal"),
    [
        ((MINE,), True, "mine", None),
        ((), False, "mine", "no longer exists"),
        ((MINE,), True, "other", "no longer exists"),
        ((MINE,), True, "", "this needs a key"),
        ((MINE,), False, "", None),
    ],
)
async def test_a_request_has_the_rights_that_its_key_has_now(
    tmp_path: Path, keys: tuple[Key, ...], door: bool, key: str, refusal: str | None
) -> None:
    made = Made(tmp_path, (200, 0.0), keys=keys, door=door)
    status, body = await made.queue._asked(waiting(key))
    if refusal is None:
        assert (status, made.asked[0].head.holder) == (200, MINE if key else None)
    else:
        assert (status, refusal in json.loads(body)["error"]["message"], made.asked) == (401, True, [])
    await made.queue.close()


@pytest.mark.parametrize(
    ("key", "owner", "authorization"),
    [("mine", "acme", None), ("", "anonymous", None), ("", "somebody", "Bearer batches-of-somebody")],
)
async def test_a_client_without_a_known_key_still_has_a_separate_prefix_cache(
    tmp_path: Path, key: str, owner: str, authorization: str | None
) -> None:
    made = Made(tmp_path)
    head = made.queue._head(waiting(key, owner).batch)
    assert dict(head.headers).get("authorization") == authorization
    assert head.is_for_batch
    await made.queue.close()


async def test_a_request_whose_batch_has_no_time_left_is_not_waited_for_and_frees_its_place(tmp_path: Path) -> None:
    made = Made(tmp_path, (503, 3600.0))
    lane = queue._Lane("acme", "ember")
    lane.num_open, lane.is_empty = 1, True
    made.queue._lanes["acme", "ember"] = lane
    made.queue._under_way[1] = cast("Any", None)
    await made.queue._answer(lane, waiting(left_s=-1))
    assert (lane.num_open, made.queue.under_way, made.queue._lanes) == (0, (), {})
    await made.queue.close()


async def test_an_answer_is_kept_when_it_can_be(tmp_path: Path, slept: list[float]) -> None:
    made = Made(tmp_path)
    faults = iter([sqlite3.OperationalError("disk is full"), OSError("gone"), None])

    def answered(*_: Any) -> None:
        if (fault := next(faults)) is not None:
            raise fault

    cast("Any", made.queue.store).answered = answered
    await made.queue._keep(waiting(), 200, b"{}")
    assert (slept, next(faults, "all")) == ([5, 5], "all")
    await made.queue.close()


async def test_a_stop_ends_what_is_under_way(tmp_path: Path) -> None:
    made = Made(tmp_path)
    task = asyncio.create_task(asyncio.Event().wait())
    made.queue._under_way[1] = cast("Any", task)
    await made.queue.close()
    assert task.cancelled()
    with pytest.raises(RuntimeError, match="shutdown"):
        await made.queue.do(made.queue.store.waiting)


async def test_a_stream_is_no_answer_to_a_request_of_a_batch() -> None:
    answer = BatchAnswer(Head("POST", "/v1/completions", "/v1/completions", []), "batch_1.1")
    with pytest.raises(ApiError, match="answered a request of a batch with a stream"):
        await answer.start_stream(200, [])
    assert answer.status == 500
    await answer.refuse(ApiError("overloaded", "Full.", retry_after_s=7))
    assert (answer.status, answer.retry_after_s) == (503, 7)


def backend(state: str = "healthy", *, serves: bool = True, outstanding: int = 0) -> Any:
    view = SimpleNamespace(model=lambda name: name if serves else None)
    return SimpleNamespace(state=state, status=site_status(), outstanding=outstanding, view=lambda: view)


@pytest.mark.parametrize(
    ("sites", "num_open", "has_room"),
    [
        ((), 0, False),
        ((backend("draining"),), 0, False),
        ((backend(),), queue.IDLE_BELOW - 1, True),
        ((backend(),), queue.IDLE_BELOW, False),
        ((backend(), backend()), queue.IDLE_BELOW, True),
        ((backend(), backend(serves=False)), queue.IDLE_BELOW, False),  # a site without the model does not count
        ((backend(outstanding=99), backend(serves=False)), 0, False),
        ((backend(serves=False),), 0, True),  # the site will refuse it as unknown
    ],
)
async def test_there_is_room_where_a_site_that_serves_the_model_is_idle(
    tmp_path: Path, sites: tuple[Any, ...], num_open: int, has_room: bool
) -> None:
    made = Made(tmp_path)
    cast("Any", made).selector = SimpleNamespace(backends=dict(enumerate(sites)))
    for owner in ("acme", "bob"):
        made.queue.added(owner, {"ember", "other"})
        made.queue._lanes[owner, "other"].num_open = 99
    made.queue._lanes["bob", "ember"].num_open = num_open
    lane = made.queue._next_lane()
    assert (lane is not None and (lane.owner, lane.model) == ("acme", "ember")) is has_room
    await made.queue.close()


async def test_an_owners_request_that_cannot_be_read_keeps_no_other_owner_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, asked = Made(tmp_path), list[str]()
    cast("Any", made).selector = SimpleNamespace(backends={"ams1": backend()})
    cast("Any", made).admission = SimpleNamespace(is_draining=False)

    def next_waiting(owner: str, model: str, last: int) -> None:
        asked.append(owner)
        if owner == "acme":
            raise ValueError("a row of another version")

    monkeypatch.setattr(made.queue.store, "next_waiting", next_waiting)
    for owner in ("acme", "bob"):
        made.queue.added(owner, {"ember"})
    await made.queue._begin_requests()
    assert asked == ["acme", "bob"]
    assert "a row of another version" in caplog.text
    await made.queue.close()


async def test_sites_are_looked_at_once_for_each_model_however_many_wait_for_it(tmp_path: Path) -> None:
    made, site = Made(tmp_path), backend()
    view, looks = site.view(), []
    site.view = lambda: looks.append(view) or view
    cast("Any", made).selector = SimpleNamespace(backends={"ams1": site})
    for owner in ("acme", "bob", "carol"):
        made.queue.added(owner, {"ember", "other"})
    assert made.queue._next_lane() is not None
    assert len(looks) == 2
    await made.queue.close()


@pytest.mark.parametrize(
    ("status", "outstanding", "is_idle"),
    [
        (None, 0, False),  # without a status
        (site_status(), 0, True),
        (site_status(inflight=queue.IDLE_BELOW - 1), queue.IDLE_BELOW - 1, True),
        (site_status(inflight=queue.IDLE_BELOW), 0, False),
        (site_status(), queue.IDLE_BELOW, False),
        (site_status(models=(model_status(), model_status("other", waiting=1))), 0, False),
        (site_status(models=(model_status(queued_tokens=1),)), 0, False),
    ],
)
def test_a_site_is_idle_without_a_queue_and_with_few_open_requests(
    status: Any, outstanding: int, is_idle: bool
) -> None:
    assert queue._is_idle(cast("Any", SimpleNamespace(status=status, outstanding=outstanding))) is is_idle

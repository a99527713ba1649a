"""Two ranks serve one model, and one of them dies or freezes: the group is replaced, and streams continue to the same answers as without a fault."""

import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.checkpoints import write_speaking_experts
from tests.e2e.test_engine_death import REQUESTS, Stream, assert_idle, cut_sequences, end, wait_for, write_site
from tests.runtime.test_real_engine import Process

DEADLINE_S = 14.0  # step deadline: above the restart time of a group on a busy machine
# Fewer tokens than for one host, since each needs several exchanges between the ranks.
SOME = [{**body, "max_tokens": min(64, body.get("max_tokens", 64))} for body in REQUESTS[::3]]


EXPERTS = "stages = 1\nexpert_parallel = true\ndata_parallel = 2"
GROUPS = {"one stage": "stages = 1", "two stages": "stages = 2", "sequences of their own": EXPERTS}


def write_group(folder: Path, split: str) -> Path:
    source = str(write_speaking_experts(folder / "experts")) if split == EXPERTS else "embedded:ember"
    file = write_site(folder, source, continue_within_s=60.0, step_deadline_s=DEADLINE_S)
    file.write_text(file.read_text().replace('device = "cpu"', 'devices = [["cpu", "cpu"]]\n' + split))
    return file


# Two stages repeat the cases of one, so they are marked slow.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(split, marks=pytest.mark.slow) if split == "stages = 2" else split for split in GROUPS.values()
    ],
    ids=list(GROUPS),
)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("site")
    started = Process(write_group(folder, request.param), folder / "log")
    yield started
    ranks = ranks_of(started)
    end(started)
    psutil.wait_procs(ranks, timeout=20)
    assert not any(rank.is_running() for rank in ranks), "a rank outlives its site"


@pytest.fixture(scope="module")
def undisturbed(site: Process) -> list[Any]:
    streams = [Stream(site.url, body) for body in SOME]
    for stream in streams:
        stream.end()
    return [stream.answer for stream in streams]


def ranks_of(site: Process) -> list[psutil.Process]:
    """Return the process of the first rank, and the ranks that it started."""
    engine = site.engine()
    found = [child for child in engine.children() if "pilotlight.engine.parallel.follower" in child.cmdline()]
    return [engine, *found]


def strike(site: Process, undisturbed: list[Any], rank: int, blow: signal.Signals, after_events: int) -> None:
    """Send a rank the signal `blow` after some events; check that the streams are whole and the group is replaced. Keep `after_events` small: on a
    busy machine there are few events, with many tokens each."""
    before = cut_sequences(site)
    ranks = ranks_of(site)
    assert len(ranks) == 2
    heard = threading.Semaphore(0)
    streams = [Stream(site.url, body, on_event=heard.release) for body in SOME]
    for _ in range(after_events):
        assert heard.acquire(timeout=60)
    ranks[rank].send_signal(blow)
    for stream in streams:
        stream.end()
    for body, stream, expected in zip(SOME, streams, undisturbed, strict=True):
        assert stream.answer == expected, body
    assert cut_sequences(site).get("failed", 0) == before.get("failed", 0)
    psutil.wait_procs(ranks, timeout=20)
    assert not any(one.is_running() for one in ranks), "a rank of the lost group is still there"
    assert_idle(site)


def test_two_ranks_answer_like_one_process_would_and_sleep_leaves_nothing(
    site: Process, undisturbed: list[Any]
) -> None:
    assert len(ranks_of(site)) == 2
    assert all(answer is not None for answer in undisturbed)
    assert_idle(site)


# The parameters have the order of the fixture, so that pytest does not restart the sites.
one_stage_and_slowly_two = pytest.mark.parametrize(
    "site",
    [GROUPS["one stage"], *(pytest.param(GROUPS[name], marks=pytest.mark.slow) for name in [*GROUPS][1:])],
    ids=GROUPS,
    indirect=True,
)


@pytest.mark.parametrize("rank", [0, 1])
def test_streams_continue_when_a_rank_dies(
    request: pytest.FixtureRequest, site: Process, undisturbed: list[Any], rank: int
) -> None:
    if rank == 0 and request.node.callspec.params["site"] != GROUPS["one stage"]:
        pytest.skip("the end of the first rank does not depend on how ranks share the work")
    strike(site, undisturbed, rank, signal.SIGKILL, after_events=12)


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.slow)])
@one_stage_and_slowly_two
def test_streams_continue_when_a_rank_freezes(site: Process, undisturbed: list[Any], rank: int) -> None:
    """The step deadline ends a group whichever rank freezes. Each case takes this long, so all but one are marked slow."""
    strike(site, undisturbed, rank, signal.SIGSTOP, after_events=12)


@one_stage_and_slowly_two
def test_a_rank_that_dies_while_nothing_is_asked_is_replaced(site: Process, undisturbed: list[Any]) -> None:
    old = ranks_of(site)
    old[1].kill()
    wait_for(lambda: site.engine().pid != old[0].pid and len(ranks_of(site)) == 2, timeout_s=60)
    stream = Stream(site.url, SOME[0])
    stream.end()
    assert stream.answer == undisturbed[0]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_blows_at_random_leave_no_process_and_no_shared_memory(site: Process, undisturbed: list[Any]) -> None:
    chance = random.Random(22)
    shared = shared_memory()
    for _ in range(50):
        blow = chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
        strike(site, undisturbed, chance.randrange(2), blow, after_events=chance.randrange(1, 80))
    assert len(ranks_of(site)) == 2
    assert shared_memory() <= shared


def shared_memory() -> set[str]:
    """Return the names in /dev/shm, except those of PostgreSQL, which may run on the machine."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("PostgreSQL.")}

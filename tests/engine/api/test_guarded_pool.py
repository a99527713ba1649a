"""Child processes that run jobs on untrusted bytes: a job that ends its process gets a specific error, and affects no other job."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from pilotlight.engine.api.guarded_pool import SLACK, GuardedJob, GuardedPool, JobCall, JobEndedError, JobError
from tests.waiting import until

pytestmark = pytest.mark.process


def add(first: int, second: int) -> int:
    return first + second


def process_id() -> int:
    return os.getpid()


def niceness() -> int:
    return os.nice(0)


def prepare(path: str) -> None:
    os.environ["PREPARED"] = path


def prepared() -> str | None:
    return os.environ.get("PREPARED")


def crash() -> None:
    ctypes.string_at(0)


def recurse_without_end() -> None:
    """Overflow the C stack, which Python's recursion limit does not guard."""
    sys.setrecursionlimit(10**9)
    nested: Any = []
    for _ in range(10**6):
        nested = [nested]
    repr(nested)


def spin() -> None:
    while True:
        pass


def sleep() -> None:
    signal.pause()


def take_memory() -> None:
    bytes(1 << 30)


def take_memory_natively() -> None:
    ctypes.CDLL(None).abort()


def end_from_outside() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_unknown_city() -> None:
    raise KeyError("Atlantis")


def panic() -> None:
    raise KeyboardInterrupt("as a panic of Rust, no Exception")


@pytest.fixture
def pool() -> Iterator[GuardedPool]:
    made = GuardedPool(1)
    yield made
    made.close()


def run(
    pool: GuardedPool,
    function: Any,
    *arguments: Any,
    cpu_s: float = 20.0,
    prepared_by: JobCall | None = None,
    slack: float = SLACK,
) -> Any:
    job = GuardedJob(JobCall(function, arguments), cpu_s, 64 << 20, prepared_by, slack)
    return pool.submit(job).result(timeout=120)


def test_jobs_run_in_another_process_which_serves_many(pool: GuardedPool) -> None:
    assert run(pool, add, 2**70, -1) == 2**70 - 1
    first = run(pool, process_id)
    assert first != os.getpid()
    assert run(pool, process_id) == first


def test_no_signal_of_the_terminal_and_none_for_servers_reaches_a_child(pool: GuardedPool) -> None:
    child = run(pool, process_id)
    assert os.getpgid(child) != os.getpgrp()
    os.kill(child, signal.SIGHUP)
    os.kill(child, signal.SIGUSR2)
    assert run(pool, process_id) == child


def test_a_child_holds_no_torch(pool: GuardedPool) -> None:
    assert not run(pool, holds_torch)


def holds_torch() -> bool:
    return "torch" in sys.modules


def test_what_is_prepared_is_there_for_later_jobs(pool: GuardedPool) -> None:
    assert run(pool, prepared, prepared_by=JobCall(prepare, ("tokenizer.json",))) == "tokenizer.json"
    assert run(pool, prepared) == "tokenizer.json"


def test_an_exception_of_a_job_is_named_and_its_child_continues(pool: GuardedPool) -> None:
    child = run(pool, process_id)
    with pytest.raises(JobError, match="Atlantis") as raised:
        run(pool, raise_unknown_city)
    assert raised.value.name == "KeyError"
    assert run(pool, process_id) == child


def test_a_panic_is_named_and_its_child_is_replaced(pool: GuardedPool) -> None:
    child = run(pool, process_id)
    with pytest.raises(JobError, match="as a panic") as raised:
        run(pool, panic)
    assert raised.value.name == "KeyboardInterrupt"
    assert run(pool, process_id) != child


@pytest.mark.parametrize(
    ("function", "reason", "said"),
    [
        (crash, "crash", "SIGSEGV"),
        (recurse_without_end, "crash", "SIGSEGV"),
        (take_memory_natively, "memory", "SIGABRT"),
        (take_memory, "memory", "more than 64 MiB"),
        (end_from_outside, "lost", "too early"),
    ],
)
def test_what_ends_a_job_is_named_and_the_next_job_has_a_new_child(
    pool: GuardedPool, function: Any, reason: str, said: str
) -> None:
    child = run(pool, process_id)
    with pytest.raises(JobEndedError, match=said) as ended:
        run(pool, function)
    assert ended.value.reason == reason
    assert ended.value.is_jobs_fault == (reason != "lost")
    assert run(pool, process_id) != child


def test_a_job_that_takes_too_much_cpu_time_ends(pool: GuardedPool) -> None:
    slack = 1e3  # no wall-clock limit: a busy machine gives little CPU time
    with pytest.raises(JobEndedError, match=r"more than 0\.5 s of CPU time") as ended:
        run(pool, spin, cpu_s=0.5, slack=slack)
    assert ended.value.reason == "cpu"


def test_a_job_that_gets_no_cpu_time_ends_at_its_deadline_without_its_fault(pool: GuardedPool) -> None:
    with pytest.raises(JobEndedError, match="overloaded") as ended:
        run(pool, sleep, cpu_s=0.01)
    assert ended.value.reason == "deadline"
    assert not ended.value.is_jobs_fault


def test_what_ends_a_child_while_it_prepares_is_no_fault_of_the_job(pool: GuardedPool) -> None:
    with pytest.raises(JobEndedError) as ended:
        run(pool, add, 1, 2, prepared_by=JobCall(crash))
    assert ended.value.reason == "lost"
    assert run(pool, add, 1, 2) == 3


def test_beside_a_job_that_crashes_others_continue() -> None:
    pool = GuardedPool(2)
    crashing = [pool.submit(GuardedJob(JobCall(crash), 20.0, 64 << 20)) for _ in range(3)]
    adding = [pool.submit(GuardedJob(JobCall(add, (i, 1)), 20.0, 64 << 20)) for i in range(6)]
    assert [each.result(timeout=120) for each in adding] == list(range(1, 7))
    assert all(isinstance(each.exception(timeout=120), JobEndedError) for each in crashing)
    pool.close()


def test_a_child_that_ended_is_started_and_prepared_again_before_a_job_needs_it() -> None:
    this, pool = psutil.Process(), GuardedPool(1)
    others = set(this.children())
    try:
        with pytest.raises(JobEndedError):
            pool.submit(GuardedJob(JobCall(crash), 5.0, 1 << 28, JobCall(prepare, ("again",)))).result()
        until(lambda: bool(set(this.children()) - others))
        assert run(pool, prepared) == "again"
    finally:
        pool.close()


@contextmanager
def few_files(most_free: int) -> Iterator[None]:
    """Let this process open only so many more files."""
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    limit = next(n for n in count() if n - sum(fd < n for fd in used) == most_free)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("most_free", [0, 2])
def test_a_child_that_could_not_be_started_is_started_for_a_later_job(pool: GuardedPool, most_free: int) -> None:
    with few_files(most_free), pytest.raises(JobEndedError, match="Too many open files") as ended:
        run(pool, add, 1, 2)
    assert ended.value.reason == "lost"
    assert run(pool, add, 1, 2) == 3


def test_closing_ends_the_job_under_way(pool: GuardedPool) -> None:
    child = run(pool, process_id)
    sleeping = pool.submit(GuardedJob(JobCall(sleep), 20.0, 64 << 20))
    until(lambda: sleeping.running())
    pool.close()
    assert isinstance(sleeping.exception(timeout=60), JobEndedError)
    until(lambda: not Path(f"/proc/{child}").exists())


def test_a_child_ends_with_its_parent() -> None:
    script = (
        "from tests.engine.api.test_guarded_pool import *\n"
        "print(run(GuardedPool(1), process_id), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    child = int(done.stdout)
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())


@pytest.mark.parametrize("wanted", [0, 5])
def test_children_are_as_nice_as_their_pool_wants(wanted: int) -> None:
    """Templates run at the site's priority, since a chat waits for them; grammars run at a lower priority than streams."""
    pool = GuardedPool(1, wanted)
    try:
        assert pool.submit(GuardedJob(JobCall(niceness), 20.0, 64 << 20)).result(timeout=120) == min(
            19, os.nice(0) + wanted
        )
    finally:
        pool.close()

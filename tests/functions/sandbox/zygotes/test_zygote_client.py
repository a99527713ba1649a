"""The runtime's checks of a zygote's messages; the test is the zygote."""

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from typing import Any, cast

import msgspec
import pytest

from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.zygotes.control_messages import (
    MAX_MESSAGE_BYTES,
    Boot,
    Command,
    Confined,
    Died,
    Failed,
    ForkIsolate,
    Imported,
    Report,
    Started,
    command_decoder,
)
from pilotlight.functions.sandbox.zygotes.zygote_client import (
    BESIDE_SHARE,
    COPIED_MIB,
    FORGED,
    FORK_CPU_S,
    LOOK_S,
    SELDOM_S,
    ChildProcess,
    FunctionZygote,
    ZygoteConnection,
    ZygoteError,
)
from pilotlight.support.time_limits import NO_PAUSES, Pauses
from tests.asgi import eventually
from tests.clock import Clock

pytestmark = pytest.mark.process

Process = subprocess.Popen[bytes]


class Zygote:
    """The zygote's end of a connection."""

    def __init__(self) -> None:
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.failed: list[str] = []
        self.connection = ZygoteConnection(ours, os.getpid, self.failed.append)

    def ask(self, size: int = 0) -> ChildProcess:
        return self.connection.ask(lambda id: ForkIsolate(id, Boot("m" * size, [], [])), [])

    def command(self) -> Command:
        return command_decoder.decode(self._socket.recv(MAX_MESSAGE_BYTES))

    def say(self, report: Report | bytes, *fds: int) -> None:
        data = report if isinstance(report, bytes) else msgspec.msgpack.encode(report)
        socket.send_fds(self._socket, [data], [*fds])
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
async def zygote() -> AsyncIterator[Zygote]:
    made = Zygote()
    yield made
    made.connection.close()
    made.close()


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Two children of this process."""
    made = [subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2)]
    yield made
    for process in made:
        process.kill()
        process.communicate()


async def test_a_process_that_was_asked_for_is_known_until_it_is_dead(zygote: Zygote, processes: list[Process]) -> None:
    process = processes[0]
    child = zygote.ask()
    assert (zygote.command(), zygote.connection.is_settled) == (ForkIsolate(1, Boot("", [], [])), False)
    zygote.say(Started(1), os.pidfd_open(process.pid))
    await asyncio.wait_for(child.started, 60)
    assert (child.pid, zygote.connection.pids, zygote.connection.is_settled) == (process.pid, {process.pid}, True)
    child.kill()
    await asyncio.to_thread(process.wait)
    told = Died(1, 9, 0.5, 100)
    zygote.say(told)
    assert await asyncio.wait_for(child.died, 60) == told
    assert (zygote.connection.pids, child.pidfd, child.cpu_s(), zygote.failed) == (set(), -1, 0.0, [])
    child.kill()


async def test_a_process_that_cannot_be_made_has_a_reason_and_so_has_a_failed_zygote(zygote: Zygote) -> None:
    child = zygote.ask()
    zygote.say(Failed(1, "no room"))
    with pytest.raises(ZygoteError, match="no room"):
        await asyncio.wait_for(child.started, 60)
    assert (child.died.result(), zygote.connection.is_settled) == (None, True)
    zygote.say(Failed(-1, "no tier"))
    await eventually(lambda: zygote.failed == ["no tier"])
    assert not zygote.connection.closed


@pytest.mark.parametrize(
    "reports",
    [
        ["started 7"], ["started 1 without"], ["started 1", "started 1"], ["started 1", "started 2 same"], ["started 1 parent"],
        ["started 1 nothing"], ["died 1"], ["started 1", "died 1"], ["started 1", "failed 1"], ["failed 7"], ["confined", "confined"], ["garbage"],
        ["failed 1", "failed 1"], ["died 7"],
    ],
    ids=" ".join,
)  # fmt: skip
async def test_who_says_what_cannot_be_is_ended_with_all_its_processes(
    zygote: Zygote, processes: list[Process], reports: list[str]
) -> None:
    before = {*os.listdir("/proc/self/fd")}
    children = [zygote.ask(), zygote.ask()]
    for text in reports:
        kind, id, how = [*text.split(), "", ""][:3]
        if kind == "started":
            fds = {
                "without": list[int], "parent": lambda: [os.pidfd_open(os.getpid())], "nothing": lambda: [os.open(os.devnull, os.O_RDONLY)],
            }.get(how, lambda: [os.pidfd_open(processes[0].pid)])()  # fmt: skip
            zygote.say(Started(int(id)), *fds)
        else:
            said: dict[str, Report | bytes] = {
                "died": Died(int(id or 0), 9, 0.0, 0), "failed": Failed(int(id or 0), "why"), "confined": Confined(), "garbage": b"\xc1",
            }  # fmt: skip
            zygote.say(said[kind])
    await eventually(lambda: zygote.connection.closed)
    assert zygote.failed == [FORGED]
    assert all(child.died.done() and child.pidfd == -1 for child in children)
    assert {*os.listdir("/proc/self/fd")} <= before, "all received descriptors are closed"
    with pytest.raises(ZygoteError, match="is gone"):
        zygote.ask()


async def test_a_zygote_that_ends_takes_its_processes_along(zygote: Zygote, processes: list[Process]) -> None:
    children = [zygote.ask(), zygote.ask()]
    zygote.say(Started(1), os.pidfd_open(processes[0].pid))
    await asyncio.wait_for(children[0].started, 60)
    zygote.close()
    await eventually(lambda: zygote.connection.closed)
    assert await asyncio.to_thread(processes[0].wait) == -9
    assert [child.died.result() for child in children] == [None, None]
    with pytest.raises(ZygoteError, match="ended before it had started"):
        await children[1].started
    assert zygote.connection.pids == set()


async def test_a_command_is_as_large_as_a_message(zygote: Zygote) -> None:
    small = len(msgspec.msgpack.encode(ForkIsolate(1, Boot("m" * 100_000, [], [])))) - 100_000
    with pytest.raises(ZygoteError, match="of at most"):
        zygote.ask(MAX_MESSAGE_BYTES - small + 1)
    assert zygote.connection.pids == set()
    child = zygote.ask(MAX_MESSAGE_BYTES - small)
    assert not child.started.done()
    assert len(msgspec.msgpack.encode(zygote.command())) == MAX_MESSAGE_BYTES


class Measured(ChildProcess):
    """A zygote's process whose usage the test sets."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid, self.cpu, self.memory = pid, 0.0, 10

    def cpu_s(self) -> float:
        return self.cpu

    def memory_mib(self) -> int:
        return self.memory


class Watched:
    """A function's zygote with a clock that the test moves."""

    limits = FunctionLimits(cpu_ms=200, memory_mib=64, start_s=20.0)

    def __init__(self, pid: int, pauses: Pauses = NO_PAUSES) -> None:
        self.clock = Clock(1000.0)
        ours, self._socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.child, self.shared_mib = Measured(pid), 0
        self.zygote = FunctionZygote(self.child, ours, lambda: self.shared_mib, self.clock, pauses)

    async def say(self, report: Report) -> None:
        self._socket.send(msgspec.msgpack.encode(report))
        for _ in range(5):
            await asyncio.sleep(0)

    def look(self, after_s: float = LOOK_S, *, is_asleep: bool = False) -> str:
        self.clock.now += after_s
        return self.zygote.why_ended(self.limits, is_asleep=is_asleep)

    def close(self) -> None:
        self.zygote.close()
        self._socket.close()


@pytest.fixture
async def watched(processes: list[Process]) -> AsyncIterator[Watched]:
    made = Watched(processes[0].pid)
    yield made
    made.close()


async def test_imports_may_take_their_time_and_no_more(watched: Watched) -> None:
    watched.child.cpu = 15.0
    assert watched.look(20.0) == ""
    assert "not imported within 20 s" in watched.look(LOOK_S)


async def test_a_pause_of_the_site_does_not_count_as_time_of_an_import(processes: list[Process]) -> None:
    with closing(Watched(processes[0].pid, Pauses(LOOK_S))) as watched:
        assert watched.look() == ""
        assert watched.look(100.0) == "", "the site was stopped, perhaps with its whole machine"
        for _ in range(40):
            assert watched.look(LOOK_S) == ""
        assert "not imported within 20 s" in watched.look(LOOK_S)


async def test_what_packages_compute_beside_requests_counts_from_their_import(watched: Watched) -> None:
    watched.child.cpu = 5.0
    await watched.say(Imported())
    assert watched.look() == ""
    watched.child.cpu = 5.2
    assert watched.look() == "", "as much CPU time as one request may use"
    watched.child.cpu = 5.25
    assert watched.look(LOOK_S / 2) == "", "the next check is not due"
    assert "more than 200 ms of CPU time outside" in watched.look(LOOK_S / 2)
    watched.child.cpu = 5.2 + BESIDE_SHARE * 100
    assert watched.look(100.0) == "", "allowed to threads that packages start"


async def test_a_fork_may_cost_something(watched: Watched) -> None:
    await watched.say(Imported())
    assert watched.look() == ""
    for number in range(1, 11):
        watched.zygote.fork(Boot("", [], []), [])
        await watched.say(Failed(number, "no room"))
    watched.child.cpu = 0.2 + 10 * FORK_CPU_S
    assert watched.look() == ""
    watched.child.cpu += 0.1
    assert "CPU time outside" in watched.look()


async def test_isolates_that_do_not_start_are_the_zygotes_fault_after_a_while(watched: Watched) -> None:
    await watched.say(Imported())
    assert watched.look() == ""
    watched.zygote.fork(Boot("", [], []), [])
    assert watched.look(20.0) == ""
    assert "kept its isolates from starting" in watched.look()
    await watched.say(Failed(1, "no room"))
    assert watched.look() == ""


async def test_its_memory_has_a_limit_and_one_that_sleeps_is_looked_at_seldom(watched: Watched) -> None:
    await watched.say(Imported())
    watched.child.memory = 64
    assert watched.look() == ""
    watched.child.memory = 65
    assert watched.look(SELDOM_S - 0.1, is_asleep=True) == ""
    assert "65 MiB of memory, of at most 64" in watched.look(0.1, is_asleep=True)
    watched.zygote.fail("it is over")
    watched.zygote.fail("again")
    assert (watched.look(10.0), watched.zygote.why_failed, watched.zygote.is_alive) == ("", "it is over", False)


async def test_what_ending_it_would_free_is_what_it_does_not_share(watched: Watched) -> None:
    assert watched.zygote.memory_mib == 10
    watched.shared_mib = 4
    assert watched.zygote.memory_mib == 6 + COPIED_MIB
    watched.shared_mib = 40
    assert watched.zygote.memory_mib == COPIED_MIB
    watched.child.memory = 0
    assert watched.zygote.memory_mib == 0
    cast(Any, watched.child).died.set_result(None)
    assert not watched.zygote.is_alive

"""Limits of the code that a function's zygote imports, and checks of its reports, against packages of a malicious author."""

import asyncio
import errno
import os
import pty
import subprocess
import sys

import pytest

from pilotlight.functions.sandbox.confinement import system
from pilotlight.functions.sandbox.processes import descendants
from pilotlight.functions.sandbox.zygotes.zygote_client import FORGED
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker
from tests.functions.host.test_hostile import GOOD, fault_of

pytestmark = pytest.mark.process

USES = """
import evil
from workers import Response, WorkerEntrypoint
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(str(evil.SAID))
"""
CONTROL = """
import array, os, socket, threading, time
SAID = "ready"
def control():
    for number in range(3, 20):
        try:
            found = socket.socket(fileno=os.dup(number))
        except OSError:
            continue
        if found.type == socket.SOCK_SEQPACKET:
            return found
"""


def add(served: Served, package: str) -> None:
    served.add(USES, "bad", python_modules__evil_dot_py=package)


def zygote_pid(served: Served, name: str = "bad") -> int:
    zygote = served.functions.pools[name].factory.zygote.current
    return 0 if zygote is None else zygote.pid


async def test_a_package_starts_no_process_when_it_is_imported(served: Served) -> None:
    attempts = ("os.fork()", "subprocess.run(['/bin/true'])", "os.posix_spawn('/bin/true', ['true'], {})")
    package = "import os, subprocess\nSAID = []\n"
    for attempt in attempts:
        package += f"try:\n    {attempt}\n    SAID.append('started')\nexcept OSError as e:\n    SAID.append(type(e).__name__)\n"
    add(served, package)
    assert await served.get(name="bad") == str(["PermissionError"] * len(attempts)).encode()
    known = {
        isolate.process.child.pid
        for isolate in served.functions.pools["bad"].isolates.living
        if isolate.process.child is not None
    }
    assert descendants(zygote_pid(served)) == known


async def test_a_package_that_takes_an_isolates_fork_for_itself_is_ended_with_all_its_processes(served: Served) -> None:
    add(
        served,
        """
        import os, threading, time
        SAID = "ready"
        def take():
            while True:
                try:
                    if os.fork() == 0:
                        while True:
                            pass
                except OSError:
                    time.sleep(0.01)
        threading.Thread(target=take, daemon=True).start()
        """,
    )
    served.add(GOOD, "good")
    seen: set[int] = set()
    said = ""
    while "processes" not in said:
        answer = await asyncio.gather(served.get(name="bad"), return_exceptions=True)
        said = str(answer[0])
        seen |= descendants(zygote_pid(served))
        assert await served.get(name="good") == b"well"
    await served.functions.pools["bad"].close()
    await eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in seen))


async def test_a_package_that_computes_beside_requests_is_ended(make_served: ServedMaker) -> None:
    package = """
    import threading
    SAID = "ready"
    def spin():
        while True:
            pass
    threading.Thread(target=spin, daemon=True).start()
    """
    async with make_served(limits={"cpu_ms": 200}) as served:
        add(served, package)
        lines: list[str] = []
        served.functions.pools["bad"].reports.follow = lines.append
        assert await served.get(name="bad") == b"ready"
        first = zygote_pid(served)
        await eventually(lambda: any("more than 200 ms of CPU time outside requests" in line for line in lines))
        await eventually(lambda: not os.path.exists(f"/proc/{first}"))


async def test_a_package_that_hoards_shared_memory_is_ended(make_served: ServedMaker) -> None:
    package = """
    import mmap
    SAID = mmap.mmap(-1, 256 << 20)
    for _ in range(256):
        SAID.write(bytes(1 << 20))
    """
    async with make_served(limits={"memory_mib": 128}) as served:
        add(served, package)
        lines: list[str] = []
        served.functions.pools["bad"].reports.follow = lines.append
        await asyncio.gather(served.get(name="bad"), return_exceptions=True)
        await eventually(lambda: any("MiB of memory, of at most 128" in line for line in lines))


@pytest.mark.parametrize("tier", [1, 2])
async def test_a_package_that_is_never_imported_is_ended_at_the_deadline(make_served: ServedMaker, tier: int) -> None:
    async with make_served(tier=tier, limits={"start_s": 0.5}) as served:
        add(served, "while True:\n    pass\n")
        assert "were not imported within 0.5 s" in (await fault_of(served)).message


@pytest.mark.parametrize("tier", [1, 2])
async def test_a_forged_death_ends_the_process_and_not_the_watch_over_it(make_served: ServedMaker, tier: int) -> None:
    package = (
        CONTROL
        + """
def forge():
    told = control()
    while not os.path.exists(os.environ["TMPDIR"] + "/now"):
        time.sleep(0.01)
    for id in range(1, 9):
        told.send(b"\\x85\\xa4type\\xa4died\\xa2id" + bytes([id]) + b"\\xa6status\\x00\\xa5cpu_s\\x00\\xabmax_rss_kib\\x00")
threading.Thread(target=forge, daemon=True).start()
"""
    )
    source = USES.replace(
        "return Response(str(evil.SAID))",
        "open(__import__('os').environ['TMPDIR'] + '/now', 'w').close()\n        while True: pass",
    )
    async with make_served(tier=tier, limits={"cpu_ms": 20_000, "blocked_s": 30.0}) as served:
        served.add(source, "bad", python_modules__evil_dot_py=package)
        asking = asyncio.ensure_future(fault_of(served))
        pool = served.functions.pools["bad"]
        await eventually(
            lambda: bool(
                pool.isolates.living
                and pool.isolates.living[0].process.child is not None
                and pool.isolates.living[0].process.child.pid > 0
            )
        )
        isolate = pool.isolates.living[0].process.child
        assert isolate is not None
        fault = await asking
        assert FORGED in fault.message
        await eventually(lambda: not os.path.exists(f"/proc/{isolate.pid}"))


ORPHAN = """
import os, signal, socket
from pilotlight.functions.sandbox.confinement import system
from pilotlight.functions.sandbox.zygotes.zygote_main import ForkServer

system.prctl(system.PR_SET_CHILD_SUBREAPER)
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
told, tells = os.pipe()
child = os.fork()
if child == 0:
    if (left := os.fork()) == 0:
        signal.pause()
    os.write(tells, b"%d" % left)
    os._exit(0)
left = int(os.read(told, 16))
server = ForkServer(theirs, lambda command, fds: None)
pidfd = os.pidfd_open(child)
server._children[pidfd] = child, 7
server._poll.register(pidfd)
server._reap(pidfd)
print(os.path.exists(f"/proc/{left}"))
"""


def test_what_a_dead_isolate_has_left_behind_is_killed() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ORPHAN]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30, env=env)
    assert said.stdout == "False\n", said.stderr


def test_what_is_forked_by_a_site_that_was_started_in_a_terminal_cannot_speak_to_that_terminal() -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # the child leads a session and has a terminal
        forked = os.fork()
        if forked == 0:
            os.close(os.open("/dev/tty", os.O_RDONLY))  # works as long as the terminal is not given up
            system.give_up_terminal()
            try:
                os.open("/dev/tty", os.O_RDONLY)
            except OSError as error:
                os._exit(7 if error.errno == errno.ENXIO else 8)
            os._exit(9)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    os.close(terminal)

"""A hostile function: one method per attempt, called by the request's path.

test_isolation.py runs all of them at each tier and writes docs/isolation.md from the results. An attempt that reaches its end was not stopped.
"""

import _socket
import asyncio
import ctypes
import fcntl
import mmap
import os
import socket
import subprocess
import threading
import time
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from workers import Response, WorkerEntrypoint, fetch
from workers.http.outbound import current_request  # type: ignore[attr-defined]  # a function cannot import pilotlight

MIB = 1 << 20
CLONE_NEWUSER, PTRACE_SEIZE = 0x10000000, 0x4206
OURS = {
    "LANG",
    "LC_CTYPE",
    "MALLOC_ARENA_MAX",
    "TZ",
    "HOME",
    "TMPDIR",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
    "REQUESTS_CA_BUNDLE",
}
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long


class Default(WorkerEntrypoint):
    async def fetch(self, request):
        url = urlsplit(request.url)
        attempt = getattr(Attempts, url.path[1:])
        return await attempt(dict(parse_qsl(url.query))) or Response("not stopped")


class Attempts:
    """Attempts of attacks.
    `query` names the targets: a neighbour's file and process, a secret file, a port of this machine."""

    async def loops_for_ever(query):
        while True:
            pass

    async def blocks_its_event_loop(query):
        time.sleep(60)

    async def loops_for_ever_after_its_client_has_left(query):
        async def pieces():
            try:
                while True:
                    yield b"x"
                    await asyncio.sleep(0)
            finally:
                while True:
                    pass

        return Response(pieces(), headers={"x-leave": "1"})

    async def allocates_without_end(query):
        hoard = []
        while True:
            hoard.append(
                bytes(16 * MIB)
            )  # never written to: the attempt must reach the memory limit before the CPU limit

    async def allocates_shared_memory_without_end(query):
        hoard = []
        while True:
            hoard.append(mmap.mmap(-1, 16 * MIB))
            hoard[-1].write(bytes(16 * MIB))
            await asyncio.sleep(0.01)

    async def forks_without_end(query):
        for _ in range(200):
            if os.fork() == 0:
                time.sleep(60)

    async def starts_threads_without_end(query):
        for _ in range(500):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    async def opens_files_without_end(query):
        return len([open("/dev/null") for _ in range(5000)])

    async def exits(query):
        os._exit(0)

    async def crashes_its_interpreter(query):
        ctypes.string_at(0)

    async def kills_itself(query):
        os.kill(os.getpid(), 9)
        time.sleep(60)

    async def writes_a_gigabyte_to_one_file(query):
        with open(os.environ["TMPDIR"] + "/big", "wb") as file:
            for _ in range(1024):
                file.write(bytes(MIB))
                file.flush()

    async def writes_many_files(query):
        for index in range(64):
            with open(f"{os.environ['TMPDIR']}/{index}", "wb") as file:
                file.write(bytes(MIB))
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)

    async def prints_without_end(query):
        while True:
            print("x" * 1000)

    async def changes_its_own_code(query):
        open(__file__, "a").close()

    async def reads_a_secret_file_of_the_site(query: Any):
        open(query["secret"]).close()

    async def reads_a_readable_file_of_a_neighbour(query: Any):
        open(query["neighbour"]).close()

    async def reads_settings_of_the_machine(query):
        open("/etc/passwd").close()

    async def finds_processes_of_the_machine(query: Any):
        os.stat(f"/proc/{query['pid']}/cmdline")

    async def finds_environment_or_descriptors_of_the_site(query):
        foreign = [number for number in range(3, 300) if _is_foreign(number)]
        if not (set(os.environ) - OURS) and not foreign:
            raise PermissionError("there is nothing")

    async def signals_a_neighbour(query: Any):
        os.kill(int(query["pid"]), 9)

    async def connects_to_a_port_of_this_machine(query: Any):
        # Python's own socket class, not the SDK's replacement
        _socket.socket().connect(("127.0.0.1", int(query["port"])))

    async def listens_on_a_port(query):
        _socket.socket().listen()

    async def asks_for_a_connection_to_a_port_of_this_machine(query: Any):
        socket.create_connection(("127.0.0.1", int(query["port"])), 5)

    async def fetches_from_a_port_of_this_machine(query: Any):
        await fetch(f"http://127.0.0.1:{query['port']}/")

    async def runs_another_program(query):
        subprocess.run(["/bin/true"], check=True)

    async def enters_a_new_user_namespace(query):
        _checked(libc.unshare(CLONE_NEWUSER))

    async def traces_a_neighbour(query: Any):
        _checked(libc.ptrace(PTRACE_SEIZE, int(query["pid"]), 0, 0))

    async def becomes_root(query):
        os.setuid(0)

    async def mounts_a_file_system(query):
        _checked(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None))

    async def speaks_nonsense_on_its_socket(query):
        for number in range(3, 20):
            try:
                os.write(number, bytes([255]) * 100)
            except OSError:
                pass
        await asyncio.sleep(30)

    async def answers_without_end(query):
        async def pieces():
            while True:
                yield bytes(60_000)

        return Response(pieces())

    async def calls_without_end(query):
        for _ in range(10_000):
            try:
                await fetch("http://127.0.0.1:1/")
            except Exception as error:
                if "subrequests" in str(error):
                    raise

    async def calls_without_end_for_no_request(query):
        current_request.set(-1)
        await Attempts.calls_without_end(query)

    async def enlarges_the_buffers_of_sockets(query):
        for end in socket.socketpair():
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

    async def enlarges_a_pipe(query):
        fcntl.fcntl(os.pipe()[1], fcntl.F_SETPIPE_SZ, 1 << 20)

    async def fills_pipes_with_pages_that_it_gives_back(query):
        _checked(min(0, libc.vmsplice(os.pipe()[1], None, 0, 0)))

    async def opens_pairs_of_sockets_without_end(query):
        hoard = []
        while True:
            hoard.append(socket.socketpair())

    async def works_on_behind_its_response_without_end(query):
        asyncio.ensure_future(_spin())
        return Response("spinning", headers={"x-spin": "1"})


async def _spin() -> None:
    while True:
        await asyncio.sleep(0)


def _is_foreign(number: int) -> bool:
    """Tell whether a descriptor is unexpected: not the channel, the log, the trace, or the event loop's."""
    try:
        what = os.readlink(f"/proc/self/fd/{number}") if os.path.exists("/proc/self/fd") else "anon"
        os.fstat(number)
    except OSError:
        return False
    return not what.startswith(("socket:", "pipe:", "anon"))


def _checked(result: Any) -> None:
    if result:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

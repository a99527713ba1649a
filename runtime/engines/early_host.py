"""The engine host that is started before its site has read its own file: its imports, which take longest, then run beside the site's.

Standard library alone, since every import before the start is waited for. The process gets its command line on standard input once the site knows
it; one whose site refuses to start reads the end of its input and ends.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio


def start_early(site_file: Path) -> "EarlyHost | None":
    """None where the system has no file descriptors of processes, to hear of their ends by."""
    if not hasattr(os, "pidfd_open"):
        return None
    environment = dict(os.environ)
    threads = _threads(site_file)
    if threads is not None:  # read when torch is imported, and the command line comes later
        environment["OMP_NUM_THREADS"] = str(threads)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.host", "--early"],
            stdin=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # as every host: it outlives the drain of its site
        )
    except OSError:
        return None  # the site will try again when it needs one, and say what it meets
    return EarlyHost(process)


def _threads(site_file: Path) -> int | None:
    """The site's reader judges the file; here a wrong one merely says nothing."""
    try:
        found: Any = tomllib.loads(site_file.read_text())["engine"]["threads"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if type(found) is int and found > 0 else None


class EarlyHost:
    """Looks like an `asyncio.subprocess.Process`, as far as a host's launcher asks."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def give(self, arguments: Sequence[str]) -> None:
        """Its command line. Raises OSError if it has died."""
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(json.dumps(arguments).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.poll()

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    async def wait(self) -> int:
        if self._process.poll() is None:
            import asyncio  # everybody has by now; before the process was started, it would have taken 30 ms

            loop = asyncio.get_running_loop()
            ended: asyncio.Future[None] = loop.create_future()
            fd = os.pidfd_open(self._process.pid)
            loop.add_reader(fd, _set, ended)
            try:
                await ended
            finally:
                loop.remove_reader(fd)
                os.close(fd)
        return self._process.wait()


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

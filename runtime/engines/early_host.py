"""The engine host that is started before its site has read its own file: its imports, which take longest, then run beside the site's.

As little of the standard library as will do, since every import before the start is waited for. The process gets what is likely, and its command line
once the site knows it, on standard input; one whose site refuses to start reads the end of its input and ends.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

SECRET_ENDINGS = ("_SECRET", "_TOKEN", "_KEY", "_PASSWORD")


def start_early() -> "EarlyHost | None":
    """None where the system has no file descriptors of processes, to hear of their ends by."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.early"],
            stdin=subprocess.PIPE,
            env=host_environment(),
            start_new_session=True,  # as every host: it outlives the drain of its site
        )
    except OSError:
        return None  # the site will try again when it needs one, and say what it meets
    return EarlyHost(process)


def host_environment() -> dict[str, str]:
    """This process's, without what signs or opens anything: an engine host reads checkpoints of strangers, and needs none of it."""
    return {name: value for name, value in os.environ.items() if not name.endswith(SECRET_ENDINGS)}


class EarlyHost:
    """Looks like an `asyncio.subprocess.Process`, as far as a host's launcher asks."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def tell(self, likely: Mapping[str, object]) -> None:
        """What the site's file says of the host's work (engine/early.py). To be called once, before `give`."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it has died: `give` says so
            self._process.stdin.write(_line(likely))
            self._process.stdin.flush()

    def give(self, arguments: Sequence[str]) -> None:
        """Its command line. Raises OSError if it has died."""
        assert self._process.stdin is not None
        with self._process.stdin as pipe:
            pipe.write(_line(arguments))

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


def _line(value: object) -> bytes:
    import json

    return json.dumps(value).encode() + b"\n"


def _set(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)

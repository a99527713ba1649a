"""A temporary PostgreSQL server on a local socket, which can be killed, stopped and started again."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

_SETTINGS = (
    "listen_addresses=", "fsync=off", "shared_buffers=16MB", "max_connections=30",
    "dynamic_shared_memory_type=mmap",  # keeps shared memory in its folder: files that a killed server leaves in /dev/shm are never removed
)  # fmt: skip


class Postgres:
    def __init__(self, programs: Path, folder: Path, user: Mapping[str, Any]) -> None:
        self.url = f"postgresql://pilotlight@/postgres?host={folder}"
        self._programs, self._folder, self._user = programs, folder, user
        self._process: subprocess.Popen[bytes] | None = None
        self._run("initdb", "--no-sync", "-A", "trust", "-U", "pilotlight", "-D", str(folder / "data"))

    def start(self) -> None:
        settings = [
            word for setting in (*_SETTINGS, f"unix_socket_directories={self._folder}") for word in ("-c", setting)
        ]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), *settings]
        with (self._folder / "log").open("ab") as log:
            process: subprocess.Popen[bytes] = subprocess.Popen(command, stdout=log, stderr=log, **self._user)
        self._process = process
        deadline = time.monotonic() + 60
        ready = [str(self._programs / "pg_isready"), "-q", "-h", str(self._folder)]
        while subprocess.run(ready, check=False).returncode:
            assert process.poll() is None, (self._folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill all its processes at once, as a power failure does."""
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait()
        # Shared memory is released with the last child, so a new server need not wait.
        (self._folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        """Send a signal to the server and to its children: one per connection, which may exit by itself."""
        assert self._process is not None
        first = psutil.Process(self._process.pid)
        for each in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run([self._programs / program, *arguments], capture_output=True, check=False, **self._user)
        assert done.returncode == 0, done.stderr.decode()


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Yield a running server.

    Raises FileNotFoundError if it is not installed. It refuses to run as root, so root runs it as another user.
    """
    programs = _programs()
    if programs is None:
        raise FileNotFoundError("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="pilotlight-pg-"))
    user: dict[str, Any] = {"cwd": folder}
    if os.geteuid() == 0:
        entry = next(each for name in ("postgres", "nobody") for each in pwd.getpwall() if each.pw_name == name)
        user |= {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
        os.chown(folder, entry.pw_uid, entry.pw_gid)
    try:
        server = Postgres(programs, folder, user)
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)


def _programs() -> Path | None:
    found = shutil.which("initdb")
    if found is not None:
        return Path(found).resolve().parent
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return installed[-1].parent if installed else None

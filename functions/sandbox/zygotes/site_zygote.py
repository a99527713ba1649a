"""Starts the process from which the zygotes of all functions on one Python are forked.

That Python is the site's or another one.
"""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.processes import memory_mib
from pilotlight.functions.sandbox.zygotes.control_messages import CreateZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import LOOK_S, FunctionZygote, ZygoteConnection
from pilotlight.support.time_limits import Pauses

ROOT = Path(__file__).parents[4]
SDK = Path(__file__).parents[2] / "sdk"


class SiteZygote:
    """The zygote for one Python, the parent of its functions' zygotes."""

    def __init__(self, python: str = sys.executable, libraries: Path | None = None) -> None:
        """`libraries` is where another Python finds msgspec and other requirements of the SDK."""
        self._python = python
        self._libraries = libraries
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: ZygoteConnection | None = None
        self._memory_mib = 0

    def start(self) -> None:
        """Start the process.
        It first imports common modules for a fraction of a second; commands wait for that."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        paths = [str(SDK), str(ROOT), str(self._libraries or _own_libraries())]
        script = (
            f"import sys; sys.path += {paths!r}; import brokered_sockets; brokered_sockets.install(); "
            f"from pilotlight.functions.sandbox.zygotes.zygote_main import main; main({theirs.fileno()})"
        )
        with theirs:
            self._process = subprocess.Popen(
                [self._python, "-I", "-S", "-X", "utf8", "-c", script],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={"LANG": "C.UTF-8", "MALLOC_ARENA_MAX": "2", "TZ": os.environ.get("TZ", "UTC"), **authorities()},
                process_group=0,
            )
        process = self._process
        self._connection = ZygoteConnection(ours, lambda: process.pid, lambda why: None)

    def create_zygote(self, limits: Confinement, imports: list[str], log_fd: int) -> FunctionZygote:
        if self._connection is None or self._connection.closed:
            self.stop()
            self.start()
        assert self._connection is not None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = self._connection.ask(lambda id: CreateZygote(id, limits, imports), [theirs.fileno(), log_fd])
        return FunctionZygote(child, ours, self._settled_mib, pauses=Pauses(LOOK_S))

    def _settled_mib(self) -> int:
        """Return the MiB that children share with this zygote; valid once a child has imported everything."""
        if self._memory_mib == 0 and self._process is not None:
            self._memory_mib = memory_mib(self._process.pid)
        return self._memory_mib

    def stop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _own_libraries() -> Path:
    spec = importlib.util.find_spec("msgspec")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


def authorities() -> dict[str, str]:
    """Return the environment variables that make functions trust the site's certificate authorities.
    `ssl` reads SSL_CERT_FILE and SSL_CERT_DIR; requests reads REQUESTS_CA_BUNDLE."""
    told = {name: os.environ[name] for name in ("SSL_CERT_FILE", "SSL_CERT_DIR") if name in os.environ}
    return {**told, "REQUESTS_CA_BUNDLE": told["SSL_CERT_FILE"]} if "SSL_CERT_FILE" in told else told

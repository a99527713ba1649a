"""The first node of a Ray cluster on this machine, for the duration of a command.

Other machines join it and lend it their devices. The node itself offers no devices, because the caller assigns this machine's. Independent of how the
cluster is used.
"""

import importlib.util
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

from pilotlight.runtime.cli.cli_error import CliError

PORT = 6379  # default port of Ray clusters
_STORE_BYTES = 80 << 20  # size of Ray's object store: about its minimum, because nothing is stored there
_START_S = 60.0
_END_S = 10.0
_LOOK_S = 0.1


@contextmanager
def ray_head(address: str | None = None, port: int = PORT) -> Iterator[str]:
    """Run a Ray head in a scope; its value is the head's HOST:PORT. Raises CliError.

    `address` is the one by which other machines reach this one.
    """
    if importlib.util.find_spec("ray") is None:
        raise CliError("Ray is not installed: pip install 'pilotlight-inference[cluster]'")
    address = address or own_address()
    with socket.socket() as probe:
        if probe.connect_ex((address, port)) == 0:
            raise CliError(f"{address}:{port} is taken, perhaps by a Ray cluster: --ray {address}:{port} joins it.")
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--node-ip-address={address}", f"--port={port}"),
        *("--num-cpus=0", "--num-gpus=0", f"--object-store-memory={_STORE_BYTES}"),
        *("--include-dashboard=false", "--disable-usage-stats"),
    ]
    with tempfile.TemporaryFile("w+") as said:
        head = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        try:
            _await(head, address, port, said)
            yield f"{address}:{port}"
        finally:
            head.terminate()
            try:
                head.wait(_END_S)
            except subprocess.TimeoutExpired:
                head.kill()
                head.wait()


def own_address() -> str:
    """Return the address by which other machines reach this one; the loopback address without a route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an unassigned address; nothing is sent
        except OSError:
            return "127.0.0.1"
        address: str = probe.getsockname()[0]
        return address


def _await(head: "subprocess.Popen[bytes]", address: str, port: int, said: IO[str]) -> None:
    deadline = time.monotonic() + _START_S
    while head.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((address, port)) == 0:
                return
        time.sleep(_LOOK_S)
    said.seek(0)
    lines = said.read().strip().splitlines() or ["it said nothing"]
    raise CliError(f"A Ray cluster cannot be started at {address}:{port}: {lines[-1]}")

"""A cluster's store as a separate process: Mooncake's master, and memory that outlives hosts.

python -m pilotlight.engine.kv.store.store_node --address 127.0.0.1:50051 --gib 8

The master is a child process, and is restarted when it exits; the store is then empty, since the master's index of the memory is lost. This module is
independent of blocks.
"""

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pilotlight.engine.kv.store.store_tier import StoreError, open_member, own_address
from pilotlight.support.parent_death import notify_at_parents_death
from pilotlight.support.service_manager import notify_ready, notify_stopping
from pilotlight.support.signals import TERMINAL, release_signals

_START_S = 20.0
_POLL_S = 0.5
_PACKAGE = "pip install 'pilotlight-inference[mooncake]'"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="127.0.0.1:50051", help="HOST:PORT on which the master listens")
    parser.add_argument("--gib", type=float, default=4.0, help="GiB of memory, for all models")
    options = parser.parse_args()
    try:
        signal.pthread_sigmask(
            signal.SIG_UNBLOCK, {signal.SIGINT}
        )  # blocked by the command line, before it became this program
        serve(options.address, round(options.gib * 2**30))
    except StoreError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def serve(address: str, segment_bytes: int) -> None:
    """Run the store until SIGTERM, SIGINT, or the end of its terminal.

    Raises StoreError if it cannot start."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    # Often sent by a program's name, to let sites reload; the store has nothing to reload.
    signal.signal(signal.SIGHUP, lambda *_: sys.exit() if TERMINAL.is_gone else None)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    release_signals()
    own = own_address(address)
    with contextlib.ExitStack() as stack:
        master = _start_master(address)
        stack.callback(lambda: _stop(master))
        store = open_member(address, own, segment_bytes)
        print(f'The KV store is ready: kv_store = "{address}" in the [engine] of site files', flush=True)
        notify_ready(f"listening on {address}")
        try:
            while True:
                time.sleep(_POLL_S)
                if master.poll() is not None:
                    print(f"Mooncake's master ended with {master.returncode}; it is started again", flush=True)
                    master = _start_master(address)
        except (KeyboardInterrupt, SystemExit):
            notify_stopping()
            store.close()  # closed while the master still runs, so that it can be notified


def _start_master(address: str) -> "subprocess.Popen[bytes]":
    """Start the master and wait until it listens at `address`. Raises StoreError."""
    host, _, port = address.rpartition(":")
    if _answers(host, int(port)):
        raise StoreError(f"{address} is taken: stop what listens there, or name another port")
    command = [
        str(_master_path()), f"--rpc_address={host}", f"--rpc_port={port}", "--metrics_host=127.0.0.1", "--metrics_port=0",
        "--enable_metric_reporting=false", "--logtostderr", "--minloglevel=2",
    ]  # fmt: skip
    # The master has its own session, so that Ctrl-C reaches only this process, which leaves the store while the master still runs.
    master = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=partial(notify_at_parents_death, signal.SIGKILL),
    )
    deadline = time.monotonic() + _START_S
    while not _answers(host, int(port)):
        if master.poll() is not None:
            raise StoreError(f"Mooncake's master ended with {master.returncode}")
        if time.monotonic() > deadline:
            _stop(master)
            raise StoreError(f"Mooncake's master does not listen at {address} after {_START_S:g} s")
        time.sleep(0.05)
    return master


def _master_path() -> Path:
    spec = find_spec("mooncake")
    if spec is None or not spec.submodule_search_locations:
        raise StoreError(f"Mooncake is not installed: {_PACKAGE}")
    path = Path(spec.submodule_search_locations[0]) / "mooncake_master"
    if not os.access(path, os.X_OK):  # wheels may be unpacked without this permission
        path.chmod(path.stat().st_mode | 0o111)
    return path


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False


def _stop(master: "subprocess.Popen[bytes]") -> None:
    master.terminate()
    try:
        master.wait(2)
    except subprocess.TimeoutExpired:
        master.kill()
        master.wait()


if __name__ == "__main__":
    main()

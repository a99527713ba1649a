"""`pilotlight doctor`: each problem of a machine is reported with its remedy."""

import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pilotlight.runtime.cli.operations import doctor
from pilotlight.runtime.cli.operations.doctor import (
    clock,
    clock_ahead_s,
    disk,
    open_files,
    port,
    shared_memory,
    user_namespaces,
)
from pilotlight.runtime.cli.operations.state_roots import StateRoot

ROOT = Path(__file__).parents[4]
pytestmark = pytest.mark.process


def shm(mib: int) -> Any:
    return cast(os.statvfs_result, SimpleNamespace(f_blocks=mib, f_frsize=1 << 20, f_bavail=mib))


def test_shared_memory_as_containers_have_it_is_too_small() -> None:
    assert shared_memory(shm(8192)).state == "ok"
    small, missing = shared_memory(shm(64)), shared_memory(None)
    assert (small.state, small.what) == ("wrong", "/dev/shm has 64 MiB")
    assert "--shm-size" in small.mend
    assert missing.state == "wrong"


def test_a_low_limit_of_files_is_a_fault_and_none_is_no_limit() -> None:
    assert open_files(1024).state == "wrong"
    assert open_files(1 << 20).state == open_files(resource.RLIM_INFINITY).state == "ok"


def test_without_user_namespaces_functions_are_isolated_less() -> None:
    assert user_namespaces(lambda: "").state == "ok"
    refused = user_namespaces(lambda: "Operation not permitted")
    assert (refused.state, "tier 1 alone: Operation not permitted" in refused.what) == ("note", True)


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        found = port("127.0.0.1", holder.getsockname()[1])
    assert (found.state, "Address already in use" in found.what) == ("note", True)
    assert port("127.0.0.1", 0).state == "ok"


def test_a_disk_without_room_or_that_cannot_be_written_is_a_fault(tmp_path: Path) -> None:
    root = StateRoot("ams1/state", tmp_path / "not" / "there")
    assert disk(root).state == "ok"
    assert "GiB free (ams1/state)" in disk(root, least=1 << 60).what
    assert "cannot be written (ams1/state)" in disk(root, may=lambda path, mode: mode != os.W_OK).what


def test_a_clock_that_is_off_is_found_by_a_time_server() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))

        def answer() -> None:
            _, client = server.recvfrom(48)
            seconds = int(time.time()) - 100 + doctor.NTP_EPOCH_S
            server.sendto(bytes(40) + seconds.to_bytes(4, "big") + bytes(4), client)

        threading.Thread(target=answer, daemon=True).start()
        ahead_s = clock_ahead_s("127.0.0.1", server.getsockname()[1])
    assert ahead_s == pytest.approx(100, abs=5)
    assert ahead_s is not None
    assert clock(ahead_s, "ntp").state == "wrong"
    assert clock(0.5, "ntp").state == "ok"
    assert clock(None, "ntp").state == "note"


def test_the_command_looks_at_the_files_machine_and_changes_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pilotlight.runtime.cli.commands", "doctor"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "Python 3" in done.stdout
    assert f"{tmp_path}/pilotlight/ams1" in done.stdout
    assert not [*tmp_path.iterdir()]

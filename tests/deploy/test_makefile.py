"""Signals to `make` reach the programs that it runs."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.waiting import until

ROOT = Path(__file__).parents[2]
INSTALLED = ".venv/.installed"
# Each program of the virtual environment: `pilotlight up` writes its process id and waits.
PROGRAMS = {"python": "exit 0", "pilotlight": "echo $$ > pid; exec sleep 60"}


def is_running(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.process
def test_a_network_of_make_up_ends_with_make(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    (folder := tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, script in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    make = subprocess.Popen(["make", "-o", INSTALLED, "up"], cwd=tmp_path, stderr=subprocess.DEVNULL)
    written = tmp_path / "pid"
    until(lambda: written.exists() and written.read_text().endswith("\n"), "the start of the network")
    pid = int(written.read_text())
    try:
        make.terminate()
        make.wait(10)
        until(lambda: not is_running(pid), "the end of the network", within_s=10)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

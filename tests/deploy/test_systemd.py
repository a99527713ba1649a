"""The systemd units of routers, sites and stores: systemd accepts them, and the processes send its notifications."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.edge_router.test_serve import network_file

ROOT = Path(__file__).parents[2]
UNITS = ROOT / "deploy" / "systemd"
PLACE = 'place = {city = "Amsterdam", latitude = 52.31, longitude = 4.76}'
ANALYZE = shutil.which("systemd-analyze")
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root directory with systemd's units, our units, and empty files in place of our commands."""
    root = tmp_path_factory.mktemp("machine")
    shutil.copytree("/lib/systemd/system", root / "lib/systemd/system", symlinks=True)
    for command in ("opt/pilotlight/bin/pilotlight", "bin/kill"):
        (root / command).parent.mkdir(parents=True, exist_ok=True)
        (root / command).touch(0o755)
    for unit in UNITS.glob("*.service"):
        shutil.copy(unit, root / "lib/systemd/system")
    return root


@needs_systemd
@pytest.mark.parametrize(
    ("unit", "most"), [("pilotlight-router", 2.0), ("pilotlight-site@ams1", 3.5), ("pilotlight-store", 2.5)]
)
def test_units_are_read_without_a_complaint_and_confine_what_they_run(machine: Path, unit: str, most: float) -> None:
    assert ANALYZE is not None
    command = [ANALYZE, f"--root={machine}", "--man=no", "verify", f"{unit}.service"]
    verified = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in verified.stderr.splitlines() if "pilotlight" in line]
    assert not ours
    limit = f"--threshold={round(10 * most)}"  # in tenths; systemd rates exposure from 0 to 10
    command = [ANALYZE, f"--root={machine}", "--offline=true", limit, "security", f"{unit}.service"]
    judged = subprocess.run(command, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout[-200:]


@pytest.mark.parametrize("unit", sorted(path.name for path in UNITS.glob("*.service")))
def test_each_unit_runs_a_command_that_there_is(unit: str) -> None:
    (line,) = [line for line in (UNITS / unit).read_text().splitlines() if line.startswith("ExecStart=")]
    program, command, *arguments = line.removeprefix("ExecStart=").split()
    assert program == "/opt/pilotlight/bin/pilotlight"
    options = [argument for argument in arguments if argument.startswith("--")]
    shown = subprocess.run(
        [sys.executable, "-m", "pilotlight.runtime.cli.commands", command, "--help"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert all(option in shown for option in options)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Yield a socket that receives notifications in place of systemd."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        yield listener


def site_file(folder: Path) -> Path:
    function = folder / "hello"
    (function / "src").mkdir(parents=True)
    (function / "wrangler.toml").write_text(
        'name = "hello"\nmain = "src/entry.py"\ncompatibility_date = "2026-01-01"\n'
        'compatibility_flags = ["python_workers"]\n'
    )
    (function / "src" / "entry.py").write_text(
        "from workers import Response, WorkerEntrypoint\n\n\n"
        "class Default(WorkerEntrypoint):\n    async def fetch(self, request):\n        return Response('hello')\n"
    )
    path = folder / "ams1.toml"
    path.write_text(
        f'name = "ams1"\n{PLACE}\n[listen]\nport = 0\n[limits]\ndrain_timeout_s = 90\n'
        f'[functions]\nserve = [{{name = "hello", path = "{function}"}}]\n'
    )
    return path


@pytest.mark.parametrize(("kind", "drain_s"), [("router", 20), ("site", 90)])
def test_a_process_notifies_its_service_manager_when_it_serves_reloads_and_ends(
    kind: str, drain_s: int, tmp_path: Path, manager: socket.socket
) -> None:
    module, file = ("pilotlight.runtime", site_file(tmp_path))
    if kind == "router":
        module, file = "pilotlight.edge_router", network_file(tmp_path, "http://127.0.0.1:9")
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "NOTIFY_SOCKET": str(tmp_path / "notify"), "XDG_STATE_HOME": str(tmp_path),
    }  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", module, str(file)], cwd=ROOT, env=environment)
    try:
        told = manager.recv(1000).decode()
        assert told.startswith("READY=1\nSTATUS=listening on http://127.0.0.1:")
        if kind == "site":
            assert manager.recv(1000).decode().startswith("STATUS=ready: http://")
        process.send_signal(signal.SIGHUP)
        assert manager.recv(1000).startswith(b"RELOADING=1\nMONOTONIC_USEC=")
        assert manager.recv(1000) == b"READY=1"
        process.terminate()
        assert manager.recv(1000) == b"STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=%d" % (drain_s * 10**6 + 15e6)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()

"""A server process that a command started: its log is kept, and the reason of its end is reported."""

import os
import signal
from pathlib import Path

import pytest

from pilotlight.runtime.cli.child import LONGEST_LOG_BYTES, Child

pytestmark = pytest.mark.process


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def run(module: str, code: str, folder: Path) -> Child:
    (folder / f"{module}.py").write_text(code)
    child = Child("ams1", [module], folder / "ams1.log", {}, verbose=False, drain_timeout_s=0.0)
    child.start()
    assert child.wait(60)
    return child


def test_a_restart_keeps_what_the_dead_process_said(modules: Path) -> None:
    child = run("speaks", "import os, sys\nprint(f'I am {os.getpid()}', flush=True)\nsys.exit(3)\n", modules)
    first = child.log.read_text()
    child.start()
    assert child.wait(60)
    assert child.log.read_text().startswith(first)
    assert len(child.log.read_text().splitlines()) == 2
    assert child.last_line() == f"it exited with status 3; its last line: {child.log.read_text().splitlines()[1]}"


def test_a_process_that_was_killed_is_not_quoted_as_if_it_had_said_so(modules: Path) -> None:
    code = "import os, signal\nprint('model ember is ready', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    assert run("killed", code, modules).last_line() == "it was ended by SIGKILL; its last line: model ember is ready"


def test_a_silent_end_after_one_with_a_message_quotes_no_other(modules: Path) -> None:
    child = run("once", "print('hello')\n", modules)
    (modules / "once.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    child.start()
    assert child.wait(60)
    assert child.last_line() == f"it was ended by {signal.SIGSEGV.name} and said nothing"


def test_a_long_log_gives_way_at_a_start_and_is_kept_once(modules: Path) -> None:
    (modules / "ams1.log").touch()
    os.truncate(modules / "ams1.log", LONGEST_LOG_BYTES + 1)
    child = run("talks", "print('a line')\n", modules)
    assert child.log.read_text() == "a line\n"
    assert (modules / "ams1.log.1").stat().st_size == LONGEST_LOG_BYTES + 1


def test_a_hangup_waits_until_the_process_is_ready_for_it(modules: Path) -> None:
    (modules / "waits.py").write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGHUP, lambda *_: sys.exit(7))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})\ntime.sleep(60)\n"
    )
    child = Child("ams1", ["waits"], modules / "ams1.log", {}, verbose=False, drain_timeout_s=0.0)
    child.start()
    child.hang_up()
    assert child.wait(60)
    assert child.exit_code == 7

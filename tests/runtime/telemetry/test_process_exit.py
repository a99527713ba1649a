"""Descriptions of a process's exit."""

import signal
from pathlib import Path

import pytest

from pilotlight.runtime.telemetry.process_exit import ending, oom_kills


@pytest.mark.parametrize(
    ("code", "before", "now", "expected"),
    [
        (3, 0, 0, "exited with status 3"),
        (-signal.SIGSEGV, 0, 1, "was ended by SIGSEGV"),
        (-signal.SIGKILL, 4, 4, "was ended by SIGKILL"),
        (-signal.SIGKILL, 4, 5, "was ended by SIGKILL: out of memory, by the kernel's OOM killer"),
        (-signal.SIGKILL, None, 5, "was ended by SIGKILL"),
        (-signal.SIGKILL, 4, None, "was ended by SIGKILL"),
        (-40, 0, 0, "was ended by signal 40"),
    ],
)
def test_an_end_says_its_status_its_signal_and_whether_memory_had_run_out(
    code: int, before: int | None, now: int | None, expected: str
) -> None:
    assert ending(code, before, lambda: now) == expected


@pytest.mark.parametrize(
    ("group", "file"), [("0::/own", "own/memory.events"), ("4:memory:/own\n0::/", "memory/own/memory.oom_control")]
)
def test_the_kernels_count_is_that_of_the_control_group_where_it_has_one(group: str, file: str, tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text(f"9:name=systemd:/\n{group}\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 2


def test_without_a_group_the_count_is_the_machines(tmp_path: Path) -> None:
    has_counter = "oom_kill " in Path("/proc/vmstat").read_text() if Path("/proc/vmstat").exists() else False
    assert (oom_kills(tmp_path / "cgroup", tmp_path) is not None) == has_counter

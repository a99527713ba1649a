"""Directories of engine hosts' sockets: removed with their site or, if it was killed, at the next site's start. Nothing else is removed."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pilotlight.runtime.hosts.socket_directory import SocketDirectory, remove_dead, remove_dead_later
from tests.waiting import until

OWNER = """
import sys, time
from pathlib import Path
from pilotlight.runtime.hosts.socket_directory import SocketDirectory
place = SocketDirectory(Path(sys.argv[1]))
print(place.directory, flush=True)
time.sleep(60)
"""


def owned_by_another(root: Path) -> "tuple[subprocess.Popen[str], Path]":
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, Path(owner.stdout.readline().strip())


def kill(owner: "subprocess.Popen[str]") -> None:
    owner.send_signal(signal.SIGKILL)
    owner.communicate(timeout=60)


@pytest.mark.process
def test_a_directory_stays_while_its_site_lives_and_is_removed_after_its_death(tmp_path: Path) -> None:
    mine = SocketDirectory(tmp_path)
    owner, theirs = owned_by_another(tmp_path)
    (theirs / "engine").touch()
    try:
        assert mine.directory.stat().st_mode & 0o777 == 0o700
        remove_dead(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([mine.directory, theirs])
    finally:
        kill(owner)
    remove_dead(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.directory]
    for _ in range(2):
        mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_directory_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pilotlight-ipc-file").touch()
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / "pilotlight-ipc-link").symlink_to(elsewhere)
    (tmp_path / "pilotlight-logs-x").mkdir()
    before = sorted(tmp_path.rglob("*"))
    remove_dead(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "pilotlight-ipc-dead").mkdir()
    remove_dead(tmp_path, user=os.getuid() + 1)
    assert (tmp_path / "pilotlight-ipc-dead").is_dir(), "it is another user's"
    remove_dead(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before


def test_one_that_was_taken_for_dead_before_it_had_its_lock_is_made_anew(tmp_path: Path) -> None:
    made: list[str] = []

    def overtaken(**options: object) -> str:
        made.append(tempfile.mkdtemp(**options))  # type: ignore[call-overload]
        if len(made) < 3:
            remove_dead(tmp_path)
        return made[-1]

    place = SocketDirectory(tmp_path, overtaken)
    assert [str(place.directory)] == made[2:]
    remove_dead(tmp_path)
    assert list(tmp_path.iterdir()) == [place.directory]
    place.remove()


@pytest.mark.process
def test_what_a_killed_site_left_is_removed_a_little_later(tmp_path: Path) -> None:
    owner, theirs = owned_by_another(tmp_path)
    kill(owner)
    assert theirs.is_dir()
    remove_dead_later(tmp_path, after_s=0.0)
    until(lambda: not theirs.exists())

"""Key files: only their owner may have access, and errors in them are named."""

import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.engine.api.keys import KeysError, read_keys, write_keys

ROOT = Path(__file__).parents[3]


def test_two_files_are_made_for_each_other_and_never_overwritten(tmp_path: Path) -> None:
    host, front_end = tmp_path / "host", tmp_path / "front_end"
    write_keys(host, front_end)
    assert read_keys(host).peer == read_keys(front_end).public
    assert read_keys(front_end).peer == read_keys(host).public
    assert read_keys(host).secret != read_keys(front_end).secret
    assert host.stat().st_mode & 0o777 == front_end.stat().st_mode & 0o777 == 0o600
    before = host.read_bytes()
    with pytest.raises(FileExistsError):
        write_keys(host, front_end)
    assert host.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"secret": "short", "peer": "short"}', '{"secret": 1, "peer": 2}']
)
def test_what_holds_no_keys_is_refused_by_name(content: str, tmp_path: Path) -> None:
    path = tmp_path / "host"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(KeysError, match=f"{path} contains no keys"):
        read_keys(path)


def test_keys_that_others_can_read_are_refused(tmp_path: Path) -> None:
    write_keys(tmp_path / "host", tmp_path / "front_end")
    (tmp_path / "host").chmod(0o640)
    with pytest.raises(KeysError, match="can be read by others"):
        read_keys(tmp_path / "host")


@pytest.mark.process
def test_a_host_without_its_keys_does_not_start(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pilotlight.engine.host.engine_host",
        "--address",
        "tcp://0.0.0.0:1",
        "--keys",
        str(tmp_path / "none"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"pilotlight.engine.host.engine_host: {tmp_path}/none cannot be read: No such file or directory\n"
    )


@pytest.mark.process
def test_the_command_makes_both_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pilotlight.engine.api.keys", str(tmp_path / "host"), str(tmp_path / "front_end")]
    subprocess.run(command, cwd=ROOT, check=True)
    assert read_keys(tmp_path / "host").peer == read_keys(tmp_path / "front_end").public
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 1
    assert again.stderr.startswith("pilotlight.engine.api.keys: ")
    assert "Traceback" not in again.stderr

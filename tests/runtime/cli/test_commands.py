"""The command line as a whole."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pilotlight.runtime.cli.commands import pilotlight


def test_the_version_is_that_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        pilotlight(version=True)
    assert re.fullmatch(r"pilotlight \d+\.\d+\S*\n", capsys.readouterr().out)


MANIFEST = """
name = "f"
main = "entry.py"
kv_namespaces = [{ binding = "KV" }]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    return tmp_path


def run(*arguments: str, encoding: str = "utf-8") -> tuple[int, bytes, str]:
    """Run the command line in a process; return its exit status, standard output and standard error."""
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", *arguments]
    done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": encoding})
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.mark.process
@pytest.mark.long
def test_a_file_that_cannot_be_written_is_named_in_one_line(folder: Path) -> None:
    here = ("--dir", str(folder))
    assert run("kv", "put", "KV", "a", "b", *here) == (0, b"", "")
    out = folder / "nowhere" / "out.json"
    failed = run("kv", "export", "KV", "--output", str(out), *here)
    assert failed == (1, b"", f"pilotlight: {out}: No such file or directory.\n")


@pytest.mark.process
@pytest.mark.long
def test_a_terminal_without_the_characters_of_a_key_shows_their_numbers(folder: Path) -> None:
    here = ("--dir", str(folder))
    assert run("kv", "put", "KV", "é日", "b", *here) == (0, b"", "")
    assert run("kv", "list", "KV", *here, encoding="latin-1") == (0, b"\xe9\\u65e5\n", "")

"""The command line as a whole."""

import io
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer

from pilotlight.runtime.cli.commands import main, pilotlight
from tests.full_disk import files_of_at_most


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


def run(*arguments: str) -> object:
    """Run the command line; return the exit status."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_a_file_that_cannot_be_written_is_named_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--dir", str(folder))
    assert run("kv", "put", "KV", "a", "b", *here) == 0
    out = folder / "nowhere" / "out.json"
    assert run("kv", "export", "KV", "--output", str(out), *here) == 1
    assert capsys.readouterr().err == f"pilotlight: {out}: No such file or directory.\n"


INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pilotlight.{module}":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["pilotlight", "site.toml"]
from pilotlight.{program}.__main__ import main
main()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "module"),
    [("runtime.cli", "runtime.cli.commands"), ("runtime", "runtime.serve"), ("edge_router", "edge_router.serve")],
)
def test_ctrl_c_during_the_imports_ends_a_command_without_a_traceback(program: str, module: str) -> None:
    code = INTERRUPTED.format(program=program, module=module)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


BECOMES = """
import os, signal, sys
from pilotlight.runtime.cli import __main__, commands

def interrupted(*arguments, execv=os.execv):
    os.kill(os.getpid(), signal.SIGINT)
    execv(*arguments)

os.execv = interrupted
sys.argv = ["pilotlight", "{command}", *"{arguments}".split()]
__main__.main()
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "arguments", "status"),
    [("site", "site.toml", -signal.SIGINT), ("router", "network.toml", -signal.SIGINT), ("store", "", 130)],
)
def test_ctrl_c_while_a_command_becomes_a_server_ends_it_without_a_traceback(
    command: str, arguments: str, status: int
) -> None:
    code = BECOMES.format(command=command, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.process
def test_ctrl_c_while_the_options_are_read_ends_a_command_without_a_traceback() -> None:
    code = (
        "import os, signal\nfrom pilotlight.runtime.cli import __main__, commands\n"
        "commands.app = lambda arguments: os.kill(os.getpid(), signal.SIGINT)\n__main__.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.process
@pytest.mark.parametrize("command", ["up", "serve", "store", "dev", "chat"])
def test_a_hangup_during_the_imports_ends_only_commands_that_serve_nobody(command: str) -> None:
    code = INTERRUPTED.format(program="runtime.cli", module="runtime.cli.commands").replace("SIGINT", "SIGHUP")
    code = code.replace('"site.toml"]', f'"{command}", "--help"]')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (-signal.SIGHUP if command == "chat" else 0)


def test_a_full_disk_is_named_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here = ("--dir", str(folder))
    assert run("kv", "put", "KV", "a", "b" * 100_000, *here) == 0
    with files_of_at_most(50_000):
        assert run("kv", "export", "KV", "--output", str(folder / "out.json"), *here) == 1
    assert capsys.readouterr().err == "pilotlight: a file cannot be written: File too large.\n"


def test_a_terminal_without_the_characters_of_a_key_shows_their_numbers(folder: Path) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    here = ("--dir", str(folder))
    with redirect_stdout(terminal):
        assert run("kv", "put", "KV", "é日", "b", *here) == 0
        assert run("kv", "list", "KV", *here) == 0
    terminal.flush()
    assert terminal.buffer.getvalue() == b"\xe9\\u65e5\n"

"""The commands in the documentation work as written, and print what the pages show.

A comment before a block states its action: `run` (each command must exit with 0 and print the lines on the page), `serve: TEXT` (start the command
and wait for the text), or `file: PATH` (write the block to the file). Ports are replaced by free ones. Blocks without a comment need a GPU or a
network, and are skipped.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from load_tests.local_network import free_ports

DOCS = Path(__file__).parents[2] / "docs"
MARKED = re.compile(r"<!-- (run|serve|file)(?:: (.*?))? -->\n```\w*\n(.*?)```\n", re.DOTALL)
PAGES = sorted(page for page in DOCS.rglob("*.md") if MARKED.search(page.read_text(encoding="utf-8")))
PORT = re.compile(r"\b8[0-9]{3}\b")


pytestmark = [pytest.mark.network, pytest.mark.long]


class Block(NamedTuple):
    """A marked block: its action, the action's argument, and its text."""

    action: str
    argument: str
    text: str

    @property
    def commands(self) -> str:
        """Return the commands, which are the lines after a prompt and their continuation lines, as a script."""
        lines = re.findall(r"^\$ ((?:.*\\\n)*.*)", self.text, re.MULTILINE)
        return "\n".join(["set -e", *lines])

    @property
    def shown(self) -> list[str]:
        """Return the lines without commands: the expected output, in which `...` matches anything."""
        without = re.sub(r"^\$ (?:.*\\\n)*.*\n", "", self.text, flags=re.MULTILINE)
        return [line for line in without.splitlines() if line.strip(". ")]


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    ports = dict(zip(dict.fromkeys(PORT.findall(text)), free_ports(len(set(PORT.findall(text)))), strict=True))
    replaced = PORT.sub(lambda found: str(ports[found[0]]), text)
    return [Block(action, argument, body) for action, argument, body in MARKED.findall(replaced)]


@contextmanager
def served(block: Block, environment: dict[str, str], folder: Path) -> Iterator[None]:
    """Run a block's command; enter the scope when it has printed the text, and stop the command at the end."""
    log = folder / f"served-{len(list(folder.glob('served-*')))}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", block.commands.replace("set -e\n", "") or "true"],
            cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            ends_at = time.monotonic() + 90
            while block.argument not in log.read_text():
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < ends_at, f"not seen: {block.argument}\n{log.read_text()}"
                time.sleep(0.05)
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.mark.timeout(300)
@pytest.mark.cpu_only
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    environment = {**os.environ, "PATH": path, "HOME": str(tmp_path), "XDG_CACHE_HOME": cache, "COLUMNS": "200"}
    with ExitStack() as scope:
        for block in blocks(page):
            if block.action == "file":
                file = tmp_path / block.argument
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
            elif block.action == "serve":
                scope.enter_context(served(block, environment, tmp_path))
            else:
                done = subprocess.run(
                    ["bash", "-c", block.commands], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
                )  # fmt: skip
                printed = done.stdout + done.stderr
                assert done.returncode == 0, printed
                for line in block.shown:
                    wanted = ".*".join(map(re.escape, line.split("...")))
                    assert re.search(wanted, printed), f"{line!r} is not in:\n{printed}"


def test_a_block_is_commands_and_what_they_print() -> None:
    block = Block("run", "", "$ curl -s \\\n    http://x\n$ true\n{...}\n...\ndone\n")
    assert block.commands == "set -e\ncurl -s \\\n    http://x\ntrue"
    assert block.shown == ["{...}", "done"]

"""`pilotlight dev` as a process: reloads, and a Ctrl-C that also ends a function's endless stream."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import httpx
import pytest

from load_tests.local_network import free_ports
from pilotlight.functions.cli.d1_commands import migration_notes
from pilotlight.functions.cli.dev import models_of, snapshot, syntax_errors
from tests.functions.cli.test_state import run

pytestmark = pytest.mark.process

SOURCE = """
import asyncio
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/quick"):
            return Response("done")
        if "/echo" in request.url:
            return Response.json([request.url, request.headers.get("authorization")])
        if request.url.endswith("/says"):
            print("something")
            return Response("said")
        async def forever():
            yield "one"
            await asyncio.sleep(3600)
        return Response(forever())
"""


class Dev:
    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/"
        command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "dev", str(folder), "--port", str(port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
        )
        self.heard = ""
        self.until("Serving http")

    def until(self, words: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.heard += line
            if words in line:
                return line
        raise AssertionError(f"it ended without {words!r}: {self.heard}")

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    (folder := tmp_path / "f").mkdir()
    (folder / "entry.py").write_text(dedent(SOURCE))
    (folder / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n')
    dev = Dev(folder, free_ports(1)[0])
    try:
        yield dev
    finally:
        dev.process.kill()
        dev.process.communicate()


def test_migrations_that_are_not_applied_are_named_at_the_start(tmp_path: Path) -> None:
    (folder := tmp_path / "f" / "migrations").mkdir(parents=True)
    (folder / "0001_t.sql").write_text("CREATE TABLE t (a);")
    (tmp_path / "f" / "entry.py").write_text(dedent(SOURCE))
    manifest = 'name = "f"\nmain = "entry.py"\n[[d1_databases]]\nbinding = "DB"\n'
    (tmp_path / "f" / "wrangler.toml").write_text(manifest)
    dev = Dev(tmp_path / "f", free_ports(1)[0])
    dev.process.kill()
    dev.process.communicate()
    command = f"pilotlight d1 migrations apply DB --dir {tmp_path / 'f'}"
    assert f"DB: not applied yet: 0001_t.sql; {command}\n" in dev.heard
    assert run(*command.split()[1:]) == "0001_t.sql  applied\n"
    assert list(migration_notes(["DB"], tmp_path / "f")) == []


@pytest.mark.parametrize("interrupts", [1, 2])
def test_ctrl_c_ends_an_endless_stream_after_a_short_grace_and_a_second_one_at_once(dev: Dev, interrupts: int) -> None:
    with httpx.stream("GET", dev.url, timeout=30) as answer:
        parts = answer.iter_text()
        assert next(parts) == "one"
        dev.interrupt()
        assert "Stopping: 1 open request may take 2 s to end (Ctrl-C again ends them now)" in dev.until("Stopping")
        if interrupts == 2:
            dev.interrupt()
        assert "Ended 1 open request" in dev.until("Ended")
        with pytest.raises(httpx.RemoteProtocolError):
            next(parts)
    assert dev.process.wait(60) == 0


def test_ctrl_c_without_open_requests_says_nothing_of_them(dev: Dev) -> None:
    assert httpx.get(dev.url + "quick", timeout=30).text == "done"
    time.sleep(1.0)  # on a busy machine a request stays open for a moment after its last byte
    dev.interrupt()
    output, _ = dev.process.communicate(timeout=60)
    assert dev.process.returncode == 0
    assert "Stopping" not in output


@pytest.mark.parametrize("path", ["api/echo/", "v1/echo/", "openai/echo"])
def test_a_function_has_its_paths_and_headers_as_they_were_sent(dev: Dev, path: str) -> None:
    answer = httpx.get(dev.url + path, headers={"x-api-key": "its own"}, timeout=30)
    assert answer.json() == [dev.url + path, None]


def test_the_page_lies_beside_the_function_which_has_all_other_paths(dev: Dev) -> None:
    page = httpx.get(dev.url + "_pilotlight/", headers={"accept": "text/html"}, timeout=30)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert httpx.get(dev.url + "_pilotlight/page/main.js").status_code == 200
    body = {"model": "ember", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
    asked = httpx.post(dev.url + "_pilotlight/v1/chat/completions", json=body, timeout=60)
    assert asked.json()["usage"]["completion_tokens"] == 4
    assert httpx.get(dev.url + "quick", headers={"accept": "text/html"}).text == "done"
    assert httpx.get(dev.url + "_pilotlight/page/functions").json() == []
    with httpx.stream("GET", dev.url + "_pilotlight/page/tail?name=f", timeout=30) as printed:
        lines = printed.iter_lines()
        assert next(lines) == ": following"
        assert httpx.get(dev.url + "says").text == "said"
        line = json.loads(next(line for line in lines if line.startswith("data:"))[5:])
        assert (line["site"], line["line"]) == ("dev", "something")
    refused = httpx.get(dev.url + "_pilotlight/page/tail?name=g")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


def test_a_syntax_error_is_shown_when_the_file_is_saved_before_any_request(dev: Dev, tmp_path: Path) -> None:
    entry = tmp_path / "f/entry.py"
    good = entry.read_text()
    assert httpx.get(dev.url + "quick", timeout=30).text == "done"  # by now the command watches the files
    entry.write_text(good + "\nclass Other(\n")
    assert 'entry.py", line' in dev.until("File")
    assert "SyntaxError: '(' was never closed" in dev.until("SyntaxError")
    assert "reloaded after entry.py" in dev.until("reloaded")
    entry.write_text(good)
    dev.until("reloaded after entry.py")
    assert httpx.get(dev.url + "quick", timeout=30).text == "done"


def test_files_with_mistakes_are_named_and_those_of_packages_left_alone(tmp_path: Path) -> None:
    for name, text in {
        "a.py": "x = (",
        "b.py": "x = 1",
        "c.txt": "x = (",
        "python_modules/d.py": "print 1",
        "e.py": "x\0",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = syntax_errors(sorted(snapshot(tmp_path)))
    assert len(found) == 2
    assert f'File "{tmp_path}/a.py", line 1' in found[0]
    assert "null bytes" in found[1]


def test_a_port_in_use_is_named_with_the_option_that_chooses_another(dev: Dev, tmp_path: Path) -> None:
    port = dev.url.rstrip("/").rpartition(":")[2]
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "dev", str(tmp_path / "f"), "--port", port]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"}, check=False
    )
    assert ended.returncode == 1
    assert f"port {port} on 127.0.0.1 is in use" in ended.stderr
    assert "or set another --port" in ended.stderr


def test_logs_and_what_it_says_itself_are_no_part_of_a_function(tmp_path: Path) -> None:
    for name in ("entry.py", ".dev.vars", ".env", ".other", "dev.log", "said.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "__pycache__").mkdir()
    with (tmp_path / "said.txt").open() as said:
        outputs = (1, said.fileno())
        assert {path.name for path in snapshot(tmp_path, outputs)} == {"entry.py", ".dev.vars", ".env"}
    assert snapshot(tmp_path / "nowhere") == {}


def test_linked_folders_are_not_watched(tmp_path: Path) -> None:
    (tmp_path / "f/src").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    for file in ("f/entry.py", "f/src/part.py", "elsewhere/other.py"):
        (tmp_path / file).write_text("")
    (tmp_path / "f/src/again").symlink_to(tmp_path / "f")
    (tmp_path / "f/large").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "f/linked.py").symlink_to(tmp_path / "elsewhere/other.py")
    (tmp_path / "start").symlink_to(tmp_path / "f")
    for folder in ("f", "start"):
        assert sorted(path.name for path in snapshot(tmp_path / folder)) == ["entry.py", "linked.py", "part.py"]


def test_several_names_of_one_model_are_its_aliases_and_the_command_line_wins() -> None:
    aliases = {"@cf/one": "ember", "@cf/two": "/models/small"}
    tables = models_of(["@cf/two=ember", "@cf/three=hf.co/org/big"], aliases, "device")
    assert [(table["name"], table["source"], table["aliases"]) for table in tables] == [
        ("ember", "embedded:ember", ["@pilotlight/ember", "@cf/one", "@cf/two"]),
        ("big", "hf.co/org/big", ["@pilotlight/big", "@cf/three"]),
    ]


def test_without_a_word_there_is_the_embedded_model() -> None:
    assert [table["source"] for table in models_of([], {}, "disk")] == ["embedded:ember"]
    assert [table["source"] for table in models_of(["/models/small"], {}, "disk")] == ["/models/small"]

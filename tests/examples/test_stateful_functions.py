"""The examples that store data, wait or use every binding, at a site and under `pilotlight dev`."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import aiohttp
import httpx
import pytest

from load_tests.local_network import free_ports
from tests.examples.conftest import FUNCTIONS

pytestmark = pytest.mark.process


def until(look: Callable[[], Any], expected: Callable[[Any], bool], timeout_s: float = 30.0) -> Any:
    ends_at = time.monotonic() + timeout_s
    while not expected(found := look()):
        assert time.monotonic() < ends_at, found
        time.sleep(0.05)
    return found


def test_notes_are_found_by_what_they_say(site: httpx.Client) -> None:
    for text in ("The spare key is under the blue pot.", "Milk is bought on Mondays.", 'A "quoted" note.'):
        assert site.post("notes/notes", json={"text": text}).status_code == 201
    answer = site.get("notes/ask", params={"q": "Where is the spare key?"}).json()
    assert answer["notes"][0] == "The spare key is under the blue pot."
    assert answer["answer"]
    assert site.get("notes/ask", params={"q": '"quoted" OR ) *'}).json()["notes"] == ['A "quoted" note.']
    assert site.get("notes/ask", params={"q": "?!"}).json()["notes"] == []


@pytest.mark.long
def test_jobs_are_done_later_and_given_up_in_the_end(site: httpx.Client) -> None:
    addresses = [f"user{n}@example.com" for n in range(15)] + ["nobody"]
    assert site.post("mailer/", json={"to": addresses}).json() == {"queued": 16}
    states = until(lambda: site.get("mailer/").json(), lambda found: len(found) == 16)
    assert states.pop("nobody") == "given up"
    assert set(states.values()) == {"sent"}


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("vars", ["Hello", "Hello", 2]),
        ("d1", "Be curious"),
        ("r2", ["stored", True, ["folder/file.txt"]]),
        ("object", ["Hello, World!", 1, "ada"]),
        ("service", 3),
        ("limit", [True, True, False]),
    ],
)
def test_one_function_uses_every_binding(site: httpx.Client, path: str, expected: Any) -> None:
    answer = site.get(f"everything/{path}")
    assert answer.status_code == 200, answer.text
    assert answer.json() == expected


def test_one_function_uses_bindings_that_answer_otherwise(site: httpx.Client) -> None:
    assert site.get("everything/kv").text == "baz"
    assert "A page of the assets" in site.get("everything/assets").text
    assert site.get("everything/ai").json()["response"]
    assert site.get("everything/queue").text == "sent"
    assert until(lambda: site.get("everything/queued").json(), bool) == "count"
    assert site.get("everything/nothing").status_code == 404


@contextmanager
def dev(folder: Path) -> Iterator[httpx.Client]:
    """Start `pilotlight dev` in the folder; yield an HTTP client when it responds."""
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "pilotlight.runtime.cli.commands", "dev", str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            ends_at = time.monotonic() + 60
            while True:
                try:
                    client.get("/")
                    break
                except httpx.TransportError:
                    assert process.poll() is None
                    assert time.monotonic() < ends_at
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(60)


def test_the_digest_is_made_by_the_clock(tmp_path: Path) -> None:
    folder = copytree(FUNCTIONS / "digest", tmp_path / "digest")
    with dev(folder) as client:
        assert client.get("/").json() == {"summary": None, "events": 0}
        for text in ("the pump was switched on", "the tank is full"):
            assert client.post("/", content=text).status_code == 202
        answer = client.get("/cdn-cgi/handler/scheduled", params={"cron": "0 * * * *", "time": "1795272000000"})
        assert (answer.status_code, answer.text) == (200, "ok")
        digest = client.get("/").json()
        assert (digest["events"], digest["cron"]) == (2, "0 * * * *")
        assert digest["at"].startswith("2026-11-21T")
        assert digest["summary"]
        client.get("/cdn-cgi/handler/scheduled")
        assert client.get("/").json()["summary"] == "Nothing happened."


def test_everything_is_called_by_the_clock_too(tmp_path: Path) -> None:
    folder = copytree(FUNCTIONS / "everything", tmp_path / "everything")
    with dev(folder) as client:
        assert client.get("/cdn-cgi/handler/scheduled", params={"cron": "*/30 * * * *"}).text == "ok"
        assert until(lambda: client.get("/last").json(), bool) == "*/30 * * * *"


def test_the_room_sends_each_message_to_all(site: httpx.Client) -> None:
    async def talk() -> list[Any]:
        url = str(site.base_url).rstrip("/")
        async with aiohttp.ClientSession() as client, client.ws_connect(f"{url}/room/attic?name=Ada") as ada:
            heard = [await ada.receive_json(timeout=60)]
            async with client.ws_connect(f"{url}/room/attic?name=Bob") as bob:
                heard.append(await ada.receive_json(timeout=60))
                assert await bob.receive_json(timeout=60) == heard[-1]
                await bob.send_str("Hello!")
                heard.append(await ada.receive_json(timeout=60))
                assert await bob.receive_json(timeout=60) == heard[-1]
            heard.append(await ada.receive_json(timeout=60))
            return heard

    assert asyncio.run(talk()) == [
        {"joined": "Ada", "here": 1},
        {"joined": "Bob", "here": 2},
        {"who": "Bob", "said": "Hello!"},
        {"left": "Bob", "here": 1},
    ]
    assert site.get("room/attic").status_code == 426

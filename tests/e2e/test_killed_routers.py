"""A background response whose router is killed is continued by another router, or by the next one with its files, with the very text."""

import asyncio
import json
import os
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import psycopg
import pytest

from load_tests.local_network import free_ports
from load_tests.postgres import Postgres, running_postgres
from pilotlight.response_store.response_rows import EXPIRES_S
from pilotlight.wire.sse import EventDecoder
from tests.e2e.one_site import PLACE
from tests.edge_router.test_kept_responses import asked_by, keys
from tests.edge_router.test_serve import ROOT, network_file, process, ready

SECRET = {"PILOTLIGHT_HOP_SECRET": "7" * 32}
SITE = """
name = "ams1"
listen = {{ port = {port} }}
engine = {{ threads = 1, kv_gib = 0.0625, standby = false }}
{place}
[[models]]
name = "ember"
source = "embedded:ember"
"""
LONG = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 120, "maxItems": 120}
SCHEMA = {"type": "object", "properties": {"numbers": LONG}, "required": ["numbers"], "additionalProperties": False}
ASKED: dict[str, Any] = {
    "model": "ember", "input": "Which numbers do you like?", "temperature": 0, "max_output_tokens": 700,
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": SCHEMA}},
}  # fmt: skip
KILLS = 3


class Network(NamedTuple):
    folder: Path
    site_url: str
    session: aiohttp.ClientSession
    environment: dict[str, str]

    def file(self, name: str, responses: str, ledger: str = "") -> Path:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        extra = f'{keys()}[responses]\ndirectory = "{folder}"\n{responses}\n[ledger]\ndirectory = "{folder}"\n{ledger}'
        return network_file(folder, self.site_url, extra=extra, drain_timeout_s=0)

    @asynccontextmanager
    async def router(self, file: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
        async with process(file, **self.environment) as (running, url), asyncio.timeout(120):
            await ready(self.session, url)
            yield running, f"{url}/v1/responses"


@asynccontextmanager
async def network(folder: Path) -> AsyncIterator[Network]:
    (port,) = free_ports(1)
    file = folder / "site.toml"
    file.write_text(SITE.format(port=port, place=PLACE))
    environment = {**SECRET, "XDG_STATE_HOME": str(folder / "state")}
    site = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pilotlight.runtime", str(file), cwd=ROOT, env={**os.environ, **environment}
    )
    try:
        async with aiohttp.ClientSession(headers=asked_by("alice")) as session:
            yield Network(folder, f"http://127.0.0.1:{port}", session, environment)
    finally:
        if site.returncode is None:
            site.kill()
        await site.wait()


async def undisturbed(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.post(url, json=ASKED) as response:
        assert response.status == 200, await response.text()
        return await response.json()


class Events:
    """The events of a response, read from one router after the other."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.all: list[Any] = []

    @property
    def id(self) -> str:
        return str(self.all[0]["response"]["id"])

    async def begin(self, url: str, until: Callable[["Events"], bool]) -> None:
        async with self._session.post(url, json={**ASKED, "background": True, "stream": True}) as response:
            await self._read(response, until)

    async def go_on(self, url: str, until: Callable[["Events"], bool]) -> None:
        url = f"{url}/{self.id}?stream=true&starting_after={self.all[-1]['sequence_number']}"
        async with self._session.get(url) as response:
            await self._read(response, until)

    async def _read(self, response: aiohttp.ClientResponse, until: Callable[["Events"], bool]) -> None:
        assert response.status == 200, await response.text()
        decoder = EventDecoder()
        async for chunk in response.content.iter_any():
            for event in decoder.feed(chunk):
                if event.data is not None:
                    assert b":pl" not in event.raw
                    self.all.append(json.loads(event.data))
            if until(self):
                return

    @property
    def text(self) -> str:
        return "".join(event["delta"] for event in self.all if event["type"] == "response.output_text.delta")

    @property
    def is_over(self) -> bool:
        return self.all[-1]["type"] in ("response.completed", "response.incomplete", "response.failed", "error")

    def check(self, whole: Any) -> None:
        """Check that nothing is missing or doubled, and that the text is that of an undisturbed response."""
        assert [event["sequence_number"] for event in self.all] == list(range(len(self.all)))
        last = self.all[-1]
        assert last["type"] == f"response.{whole['status']}", last
        assert self.text == text_of(whole)
        assert text_of(last["response"]) == text_of(whole)
        assert last["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content") or ())


def has_begun(events: Events) -> bool:
    return len(events.text) > 20


def is_over(events: Events) -> bool:
    return events.is_over


def tokens_of(records: Iterable[tuple[int, int]], whole: Any, number: int) -> None:
    """Check that a ledger has each of `number` equal answers once."""
    assert list(records) == [(whole["usage"]["input_tokens"], whole["usage"]["output_tokens"])] * number


IN_PROGRESS = "SELECT id FROM responses WHERE state = 0"
RECORDS = "SELECT prompt_tokens, output_tokens FROM usage"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_next_router_with_the_files_continues_it(tmp_path: Path, how: signal.Signals) -> None:
    async with network(tmp_path) as net:
        file = net.file("a", "")
        read, started = Events(net.session), list[Events]()
        async with AsyncExitStack() as stack:
            running, url = await stack.enter_async_context(net.router(file))
            whole = await undisturbed(net.session, url)
            for _ in range(KILLS):
                started.append(read := Events(net.session))
                await read.begin(url, has_begun)
                running.send_signal(how)
                await running.wait()
                with closing(sqlite3.connect(tmp_path / "a" / "responses.sqlite")) as responses:
                    assert responses.execute(IN_PROGRESS).fetchall() == [(read.id,)]
                running, url = await stack.enter_async_context(net.router(file))
                await read.go_on(url, is_over)
                read.check(whole)
            for each in started:
                async with net.session.get(f"{url}/{each.id}") as response:
                    assert await response.json() == each.all[-1]["response"]
            running.terminate()
            await running.wait()
        with closing(sqlite3.connect(tmp_path / "a" / "usage.sqlite")) as ledger:
            tokens_of(ledger.execute(RECORDS), whole, 1 + KILLS)


@pytest.fixture
def postgres() -> Any:
    try:
        with running_postgres() as server:
            yield server
    except FileNotFoundError as error:
        pytest.skip(str(error))


async def test_another_router_with_the_database_continues_it(tmp_path: Path, postgres: Postgres) -> None:
    store = f'store = "{postgres.url}"'
    async with network(tmp_path) as net, net.router(net.file("b", store, store)) as (_, b_url):
        whole = await undisturbed(net.session, b_url)
        for _ in range(KILLS):
            read = Events(net.session)
            async with net.router(net.file("a", store, store)) as (a, a_url):
                await read.begin(a_url, has_begun)
                a.kill()
                await a.wait()
            with psycopg.connect(postgres.url, autocommit=True) as database:
                assert database.execute(IN_PROGRESS).fetchall() == [(read.id,)]
                database.execute(f"UPDATE response_makers SET since_s = since_s - {EXPIRES_S}".encode())
                dead = "FROM responses WHERE responses.maker = response_makers.maker AND state = 0"
                database.execute(f"UPDATE response_makers SET seen_s = seen_s - {EXPIRES_S} {dead}".encode())
            await read.go_on(b_url, is_over)
            read.check(whole)
        async with net.router(net.file("a", store, store)):  # its ledger has what it counted before it was killed
            await asyncio.sleep(1.0)
        with psycopg.connect(postgres.url) as database:
            tokens_of(database.execute(RECORDS).fetchall(), whole, 1 + KILLS)

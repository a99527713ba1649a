"""Stored responses at a router that is killed with kill -9: each confirmed response can be read by its account only."""

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pilotlight.wire.sse import EventDecoder, encode_event
from tests.edge_router.fakes import FakeSite, begin, sites
from tests.edge_router.test_serve import network_file, process, ready

pytestmark = pytest.mark.process

NUM_KILLS, NUM_CLIENTS = 3, 4
PATH = "/v1/responses"


def keys() -> str:
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("alice", "alice-2", "bob")}
    tables = [
        f'[[keys]]\nname = "{name}"\naccount = "{name[:5].rstrip("-")}"\nkey_sha256 = "{digest}"\n'
        for name, digest in digests.items()
    ]
    return '[[accounts]]\nname = "alice"\n[[accounts]]\nname = "bob"\n' + "".join(tables)


def asked_by(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def answered(site: FakeSite, request: web.Request) -> web.StreamResponse:
    """Answer with a response, or with its events; leave out the end if the request asks for that."""
    asked = json.loads(site.bodies[-1])
    name = f"{len(site.bodies)}_{random.randrange(1 << 30)}"
    fields = {"id": f"resp_{name}", "status": "in_progress", "output": []}
    done = {**fields, "status": "completed", "output": [{"id": f"msg_{name}", "type": "message", "said": name}]}
    if not asked.get("stream"):
        return web.json_response(done)
    response = await begin(request)
    await response.write(event("response.created", response=fields) + event("response.output_text.delta", delta="x"))
    if "hang" in json.dumps(asked["input"]):
        await asyncio.Event().wait()
    await response.write(event("response.completed", response=done))
    return response


def event(kind: str, **fields: Any) -> bytes:
    return encode_event(json.dumps({"type": kind, **fields}).encode(), name=kind)


class Client:
    """A client with a key, for whichever router runs."""

    def __init__(self, session: aiohttp.ClientSession, url: str, name: str) -> None:
        self._session, self._url, self.headers = session, url, asked_by(name)

    async def ask(self, **fields: Any) -> Any:
        body = {"model": "ember", **fields}
        async with self._session.post(self._url + PATH, json=body, headers=self.headers) as response:
            assert response.status == 200, await response.text()
            if not fields.get("stream"):
                return await response.json()
            last = EventDecoder().feed(await response.read())[-1]
            return json.loads(last.data or b"")["response"]

    async def get(self, rest: str) -> tuple[int, bytes]:
        async with self._session.get(f"{self._url}{PATH}/{rest}", headers=self.headers) as response:
            return response.status, await response.read()

    async def fields(self, rest: str) -> Any:
        status, body = await self.get(rest)
        assert status == 200, body
        return json.loads(body)


@asynccontextmanager
async def network(folder: Path) -> AsyncIterator[tuple[FakeSite, Path, aiohttp.ClientSession]]:
    async with sites("ams1") as fakes, aiohttp.ClientSession() as session:
        fakes[0].behave = answered
        extra = f'{keys()}[responses]\ndirectory = "{folder / "responses"}"'
        yield fakes[0], network_file(folder, fakes[0].url, extra=extra, drain_timeout_s=0), session


async def test_responses_outlive_a_router_that_is_killed_and_are_their_accounts(tmp_path: Path) -> None:
    async with network(tmp_path) as (site, file, session):
        async with process(file) as (running, url):
            await ready(session, url)
            alice = Client(session, url, "alice")
            first = await alice.ask(input="one")
            second = await alice.ask(input="two", previous_response_id=first["id"], stream=True)
            started = await alice.ask(input="hang", background=True)
            assert started["status"] == "in_progress"
            running.kill()
            await running.wait()
        async with process(file) as (_, url):
            await ready(session, url)
            for key in ("alice", "alice-2"):
                client = Client(session, url, key)
                assert [await client.fields(one["id"]) for one in (first, second)] == [first, second]
            bob = Client(session, url, "bob")
            for rest in (first["id"], started["id"], f"{first['id']}/input_items", f"{started['id']}?stream=true"):
                assert (await bob.get(rest))[0] == 404
            alice = Client(session, url, "alice")
            failed = await alice.fields(started["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", "aborted")
            for place in (-1, 5, 999_999_999):
                _, told = await alice.get(f"{started['id']}?stream=true" + f"&starting_after={place}" * (place >= 0))
                *before, last = EventDecoder().feed(told)
                assert len(before) <= 2 * (place < 0)
                assert json.loads(last.data or b"") == {
                    "type": "response.failed", "sequence_number": max(place + 1, len(before)), "response": failed,
                }  # fmt: skip
            items = await alice.fields(f"{second['id']}/input_items?order=asc")
            assert [item["said"] if "said" in item else item["content"][0]["text"] for item in items["data"]] == [
                "one", first["output"][0]["said"], "two",
            ]  # fmt: skip
            await alice.ask(input="three", previous_response_id=second["id"])
            sent = json.loads(site.bodies[-1])["input"]
            assert [item["id"] for item in sent[:3]] == [item["id"] for item in items["data"]]
            assert [len(sent), sent[3]["id"], sent[4]["content"][0]["text"]] == [5, second["output"][0]["id"], "three"]


async def test_a_response_confirmed_as_kept_is_kept_whenever_the_router_is_killed(tmp_path: Path) -> None:
    rng = random.Random(7)
    told: list[Any] = []

    async def asking(client: Client, number: int) -> None:
        while True:
            told.append(await client.ask(input="one", stream=number % 2 == 0))

    async with network(tmp_path) as (_, file, session):
        for _ in range(NUM_KILLS):
            async with process(file) as (running, url):
                await ready(session, url)
                client = Client(session, url, "alice")
                tasks = [asyncio.create_task(asking(client, number)) for number in range(NUM_CLIENTS)]
                before = len(told)
                async with asyncio.timeout(30):
                    while len(told) - before < rng.randrange(10, 40):
                        await asyncio.sleep(0.001)
                running.kill()
                await running.wait()
                for task in tasks:
                    with suppress(aiohttp.ClientError, AssertionError, IndexError, KeyError):
                        await task
        assert all(one["store"] for one in told)
        async with process(file) as (_, url):
            await ready(session, url)
            client = Client(session, url, "alice")
            for one in told:
                assert await client.fields(one["id"]) == one


async def test_a_router_that_stops_ends_what_it_was_making(tmp_path: Path) -> None:
    async with network(tmp_path) as (_, file, session):
        async with process(file) as (running, url):
            await ready(session, url)
            started = await Client(session, url, "alice").ask(input="hang", background=True)
            running.terminate()
            assert await running.wait() == 0
        async with process(file) as (_, url):
            await ready(session, url)
            alice = Client(session, url, "alice")
            failed = await alice.fields(started["id"])
            assert (failed["status"], failed["error"]["code"]) == ("failed", "draining")
            events = EventDecoder().feed((await alice.get(f"{started['id']}?stream=true"))[1])
            assert [event.name for event in events][:2] == [b"response.created", b"response.output_text.delta"]
            last = json.loads(events[-1].data or b"")
            assert (events[-1].name, last["response"]) == (b"response.failed", failed)

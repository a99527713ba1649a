"""A background response continues at the next router: the same answer, for the same client, with each event and token once."""

import asyncio
import hashlib
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from load_tests.postgres import Postgres
from pilotlight.response_store.response_database import ResponseDatabase, Result, Work
from pilotlight.response_store.storage import ResponseStore
from pilotlight.wire.hop.continuation import (
    ANSWER,
    NOTHING_DELIVERED,
    RESUME_POINTS,
    ResumePoint,
    decode_answer,
    decode_delivery,
    with_resume_point,
)
from pilotlight.wire.hop.headers import ACCOUNT
from pilotlight.wire.sse import EventDecoder, encode_event
from tests.asgi import eventually
from tests.edge_router.conftest import without_responses
from tests.edge_router.fakes import SSE, FakeSite, Router, begin, router, sites
from tests.edge_router.services.test_shared_responses import time_passes

pytestmark = pytest.mark.process

PATH = "/v1/responses"
NUM_TOKENS, PROMPT_TOKENS = 10, 7
ALICE = {"authorization": "Bearer alice"}
KEYS = {
    "accounts": [{"name": "acme"}],
    "keys": [{"name": "a-key", "account": "acme", "key_sha256": hashlib.sha256(b"alice").hexdigest()}],
}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "7" * 32)


def event(kind: str, number: int, **fields: Any) -> bytes:
    return encode_event(json.dumps({"type": kind, "sequence_number": number, **fields}).encode(), name=kind)


class Answer:
    """The behaviour of a site: a response of tokens 100, 101, ... as texts, which stands still before token `until`."""

    def __init__(self, until: int = NUM_TOKENS) -> None:
        self.until = until
        self.names: list[tuple[int, int, str]] = []
        self.delivered: list[tuple[int, ...]] = []
        self.asked: list[Any] = []

    async def __call__(self, site: FakeSite, request: web.Request) -> web.StreamResponse:
        name, length = decode_answer(request.headers[ANSWER])
        delivery = decode_delivery(site.bodies[-1][:length]) if length else NOTHING_DELIVERED
        tokens = delivery.choices[0].token_ids if delivery.choices else ()
        self.names.append(name)
        self.delivered.append(tokens)
        self.asked.append(json.loads(site.bodies[-1][length:]))
        fields = {"id": f"resp_{name.nonce}", "created_at": name.created, "status": "in_progress", "output": []}
        if not self.asked[-1].get("stream"):
            return web.json_response({**fields, "status": "completed"})
        response = await begin(request, {**SSE, RESUME_POINTS: "1"})
        for i in range(len(tokens), NUM_TOKENS):
            if i == self.until:
                await asyncio.Event().wait()
            events = event("response.created", 0, response=fields) if i == 0 else b""
            events += event("response.output_text.delta", 1 + i, delta=f"<{100 + i}>")
            use = {"num_events": 2 + i, "prompt_tokens": PROMPT_TOKENS}
            await response.write(with_resume_point(events, ResumePoint(0, (100 + i,), **use)))
        text = "".join(f"<{100 + i}>" for i in range(NUM_TOKENS))
        item = {
            "id": f"msg_{name.nonce}",
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": text}],
        }
        done = {**fields, "status": "completed", "output": [item]}
        # The last resume point follows an event that has none.
        events = event("response.output_text.done", 1 + NUM_TOKENS) + event(
            "response.completed", 2 + NUM_TOKENS, response=done
        )
        use = {"num_events": 3 + NUM_TOKENS, "prompt_tokens": PROMPT_TOKENS}
        await response.write(with_resume_point(events, ResumePoint(0, (), "stop", **use)))
        return response


@asynccontextmanager
async def at_a_site(answer: Answer, **tables: Any) -> AsyncIterator[tuple[FakeSite, Router]]:
    async with sites("ams1") as fakes:
        fakes[0].behave = answer  # before the router starts, which continues responses at once
        async with router(fakes, tables=tables) as running:
            yield fakes[0], running


async def created(running: Router, headers: dict[str, str], **fields: Any) -> Any:
    body = {"model": "ember", "input": "hello", "background": True, **fields}
    async with running.http.post(running.url + PATH, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def found(running: Router, name: str, headers: dict[str, str]) -> Any:
    async with running.http.get(f"{running.url}{PATH}/{name}", headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def read(running: Router, name: str, headers: dict[str, str], place: int, number: int | None = None) -> list[Any]:
    """Return the events of a response after number `place`: all up to its end, or `number` of them."""
    decoder, events = EventDecoder(), list[Any]()
    url = f"{running.url}{PATH}/{name}?stream=true" + (f"&starting_after={place}" if place >= 0 else "")
    async with running.http.get(url, headers=headers) as response, asyncio.timeout(30):
        async for chunk in response.content.iter_any():
            assert b":pl" not in chunk
            events += [json.loads(each.data) for each in decoder.feed(chunk) if each.data is not None]
            if number is not None and len(events) >= number:
                break
    return events[:number]


def check(events: list[Any], last: Any) -> None:
    assert [one["sequence_number"] for one in events] == list(range(NUM_TOKENS + 3))
    assert "".join(one.get("delta", "") for one in events) == "".join(f"<{100 + i}>" for i in range(NUM_TOKENS))
    assert (events[-1]["type"], events[-1]["response"]) == ("response.completed", last)


@pytest.mark.parametrize("headers", [ALICE, {"authorization": "Bearer unknown", "cookie": "unknown"}, {}])
async def test_the_next_router_continues_what_one_leaves_that_stops(headers: dict[str, str], tmp_path: Path) -> None:
    tables = {"responses": {"directory": str(tmp_path)}, "ledger": {"directory": str(tmp_path)}, **KEYS}
    first, second = Answer(until=4), Answer()
    async with at_a_site(Answer(), **tables) as (_, running):
        earlier = await created(running, headers, background=False, store=True)
        async with running.http.post(running.url + "/v1/conversations", json={}, headers=headers) as response:
            talk = (await response.json())["id"]
    async with at_a_site(first, **tables) as (site, running):
        one = await created(running, headers, input="again", previous_response_id=earlier["id"])
        other = await created(running, headers, conversation=talk)
        early = await read(running, one["id"], headers, -1, 5)
        await read(running, other["id"], headers, -1, 5)
        authorization = site.seen[-1].headers.get("authorization")
        reading = asyncio.create_task(read(running, one["id"], headers, 4))
        await asyncio.sleep(0.1)
        await running.responses.close()
        (last,) = await reading
        assert (last["type"], last["code"]) == ("error", "draining")
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as stored:
        requests = stored.execute("SELECT request FROM response_requests").fetchall()
        assert len(requests) == 2
        assert not any(b"Bearer" in request or b"unknown" in request for (request,) in requests)
    async with at_a_site(second, **tables) as (site, running):
        for each in (one, other):
            late = await read(running, each["id"], headers, 4)
            check(
                [*(await read(running, each["id"], headers, -1, 5)), *late], await found(running, each["id"], headers)
            )
        assert early + await read(running, one["id"], headers, 4) == await read(running, one["id"], headers, -1)
        assert {*first.names} == {*second.names}
        assert {*second.delivered} == {(100, 101, 102, 103)}
        assert sorted(map(json.dumps, second.asked)) == sorted(map(json.dumps, first.asked))
        if headers == ALICE:
            assert site.seen[-1].headers[ACCOUNT] == "acme"
        else:
            assert bool(site.seen[-1].headers.get("authorization")) == bool(authorization)
        fields = await found(running, one["id"], headers)
        assert (fields["previous_response_id"], fields["background"], fields["store"]) == (earlier["id"], True, True)
        async with running.http.get(f"{running.url}/v1/conversations/{talk}/items", headers=headers) as response:
            assert len((await response.json())["data"]) == 2
    with closing(sqlite3.connect(tmp_path / "usage.sqlite")) as ledger:
        records = ledger.execute("SELECT account, prompt_tokens, output_tokens, outcome FROM usage").fetchall()
    assert records == 2 * [("acme" if headers == ALICE else "", PROMPT_TOKENS, NUM_TOKENS, "complete")]


async def test_sites_that_die_twice_and_a_router_between_cost_no_event(tmp_path: Path) -> None:
    tables = {"responses": {"directory": str(tmp_path)}}
    answers = [Answer(until=2), Answer(until=6)]
    for answer in answers:
        async with at_a_site(answer, **tables) as (site, running):
            if answer is answers[0]:
                one = await created(running, {})
            for _ in range(2):
                await read(running, one["id"], {}, -1, answer.until + 1)
                answer.until += 2
                await site.stop()
                await site.start()
            if answer is answers[0]:
                await read(running, one["id"], {}, -1, answer.until + 1)
                await running.responses.close()
            else:
                check(await read(running, one["id"], {}, -1), await found(running, one["id"], {}))
    assert len({*answers[0].names, *answers[1].names}) == 1
    assert [*map(len, answers[0].delivered + answers[1].delivered)] == [0, 2, 4, 6, 6, 8]


@pytest.mark.parametrize(
    "request_then", [b"no json", b"{}", b'{"fields": {}, "client": {}}', b'{"fields": 1, "client": null}']
)
async def test_a_request_that_cannot_be_read_costs_only_its_own_response(request_then: bytes, tmp_path: Path) -> None:
    tables = {"responses": {"directory": str(tmp_path)}}
    async with at_a_site(Answer(until=4), **tables) as (_, running):
        broken, sound = [await created(running, {}) for _ in range(2)]
        for each in (broken, sound):
            await read(running, each["id"], {}, -1, 5)
        await running.responses.close()
    with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as stored, stored:
        change = "UPDATE response_requests SET request = ? WHERE response = (SELECT number FROM responses WHERE id = ?)"
        assert stored.execute(change, (request_then, broken["id"])).rowcount == 1
    async with at_a_site(Answer(), **tables) as (_, running):
        check(await read(running, sound["id"], {}, -1), await found(running, sound["id"], {}))
        *_, last = await read(running, broken["id"], {}, 4)
        assert (last["type"], last["response"]["error"]["code"]) == ("response.failed", "aborted")
        assert (await found(running, broken["id"], {}))["status"] == "failed"


@pytest.mark.parametrize("method", ["DELETE", "POST"])
async def test_what_is_ended_before_it_is_continued_is_not_continued(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables, may_sweep = {"responses": {"directory": str(tmp_path)}}, asyncio.Event()
    async with at_a_site(Answer(until=4), **tables) as (_, running):
        one = await created(running, {})
        await read(running, one["id"], {}, -1, 5)
        await running.responses.close()
    monkeypatch.setattr(ResponseStore, "sweep", lambda _: may_sweep.wait())  # only after it are responses continued
    answer = Answer()
    async with at_a_site(answer, **tables) as (_, running):
        await found(running, one["id"], {})  # the first use of the store
        with closing(sqlite3.connect(tmp_path / "responses.sqlite")) as stored:
            maker = (running.responses.store.maker,)
            await eventually(lambda: stored.execute("SELECT maker FROM responses").fetchone() == maker)
        url = f"{running.url}{PATH}/{one['id']}" + ("/cancel" if method == "POST" else "")
        async with running.http.request(method, url) as response:
            assert response.status == 200
        may_sweep.set()
        for _ in range(10):
            async with running.http.get(f"{running.url}{PATH}/{one['id']}") as response:
                assert response.status == (404 if method == "DELETE" else 200)
                assert method == "DELETE" or (await response.json())["status"] == "cancelled"
        assert answer.names == []


class Away(ResponseDatabase):
    """A database that a router does not reach until it `is_back`."""

    is_shared = True

    def __init__(self, database: ResponseDatabase) -> None:
        self._database, self.name = database, database.name
        self.is_back = asyncio.Event()
        self.num_waiting = 0

    async def run(self, work: Work[Result], within_s: float, *, is_write: bool) -> Result:
        self.num_waiting += 1
        await self.is_back.wait()
        return await self._database.run(work, within_s, is_write=is_write)

    async def tidy(self, keep_s: float) -> None:
        await self._database.tidy(keep_s)

    async def close(self) -> None:
        await self._database.close()


async def test_a_router_that_comes_back_leaves_what_another_one_continues(postgres: Postgres, tmp_path: Path) -> None:
    server = without_responses(postgres)
    store = {"responses": {"store": server.url}, **KEYS}
    answer = Answer(until=4)
    async with (
        at_a_site(answer, **store, ledger={"directory": str(tmp_path / "a")}) as (site_a, a),
        at_a_site(Answer(until=4), **store, ledger={"directory": str(tmp_path / "b")}) as (site_b, b),
    ):
        one = await created(a, ALICE)
        early = await read(b, one["id"], ALICE, -1, 5)
        stores = a.responses.store, b.responses.store
        away = stores[0].database = Away(stores[0].database)
        await eventually(lambda: away.num_waiting > 0)
        time_passes(server, *stores)
        await eventually(lambda: site_b.active == 1)
        away.is_back.set()
        await eventually(lambda: site_a.active == 0)
        site_b.behave = Answer()
        await site_b.stop()
        await site_b.start()
        check(early + await read(a, one["id"], ALICE, 4), await found(a, one["id"], ALICE))
    records = []
    for name in "ab":
        with closing(sqlite3.connect(tmp_path / name / "usage.sqlite")) as ledger:
            records += ledger.execute("SELECT id, prompt_tokens, output_tokens FROM usage").fetchall()
    assert records == [(one["id"], PROMPT_TOKENS, NUM_TOKENS)]

"""A router's usage reports: each token counts once, whatever fails, and each account sees its own usage."""

import asyncio
import csv
import hashlib
import io
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.assembly import RouterLimits
from pilotlight.edge_router.metering.ledger.ledger_store import UsageQuery
from pilotlight.edge_router.metering.ledger.sqlite_store import SqliteStore
from pilotlight.wire.hop.headers import ACCOUNT, FOR_ROUTERS, HOP, HOPS, REQUEST_ID, Hop, sign_hop
from pilotlight.wire.hop.usage import USAGE, WORK
from tests.asgi import eventually
from tests.edge_router.builders import model_status
from tests.edge_router.fakes import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    FakeSite,
    FirstThen,
    Router,
    answer,
    continued_stream,
    fall_silent,
    refuse,
    reset_it,
    router,
    sites,
)

pytestmark = pytest.mark.process

PRICE = {"model": "ember", "input": 1.0, "cached_input": 0.5, "output": 3.0}


def key(name: str, *scopes: str, **more: str) -> dict[str, Any]:
    return {"name": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": [*scopes], **more}


KEYS = [
    key("alice", "models", account="acme"),
    key("al", "models", account="acme"),
    key("bob", "models"),
    key("root", "admin"),
]
ACME, BOB, ROOT = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob", "root"))


@asynccontextmanager
async def metered(
    fakes: list[FakeSite],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: RouterLimits | None = None,
    **tables: Any,
) -> AsyncIterator[Router]:
    monkeypatch.setenv("PILOTLIGHT_HOP_SECRET", "s")
    given = {
        "door": {"require_key": True},
        "accounts": [{"name": "acme"}],
        "keys": KEYS,
        "prices": [PRICE],
        "ledger": {"directory": str(directory)},
        **tables,
    }
    async with router(fakes, policy=FirstThen("ams1", "iad1"), tables=given, limits=limits) as running:
        yield running


@pytest.fixture
async def fakes() -> AsyncIterator[list[FakeSite]]:
    async with sites("ams1", "iad1") as made:
        yield made


@pytest.fixture
async def running(fakes: list[FakeSite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    async with metered(fakes, tmp_path, monkeypatch) as made:
        yield made


async def usage(running: Router, headers: dict[str, str] = ROOT, **query: str) -> list[dict[str, Any]]:
    async with running.http.get(running.url + "/usage", params=query, headers=headers) as response:
        assert response.status == 200, await response.read()
        fields = await response.json()
    assert fields["currency"] == "USD"
    rows: list[dict[str, Any]] = fields["usage"]
    for row in rows:
        assert row.pop("bytes_in") > 0
        assert row.pop("bytes_out") > 0
    return rows


def used(output: int, **more: Any) -> dict[str, Any]:
    cost = (PROMPT_TOKENS - CACHED_TOKENS) * 1000 + CACHED_TOKENS * 500 + output * 3000
    return {
        "account": "acme", "model": "ember", "requests": 1, "prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS,
        "output_tokens": output, "reasoning_tokens": 0, "drafted_tokens": 2 * output,
        "accepted_tokens": output, "device_s": output / 1000, "cpu_s": 0.0, "cost": f"0.{cost:09d}", **more,
    }  # fmt: skip


async def test_a_stream_that_loses_its_site_is_written_down_once(fakes: list[FakeSite], running: Router) -> None:
    fakes[0].behave = continued_stream(8, until=5, ending=reset_it)
    fakes[1].behave = continued_stream(8)
    async with running.chat(headers=ACME) as response:
        assert (await response.read()).count(b"data: {") == 8
    (row,) = await usage(running, by="account,model,site,outcome")
    assert row == used(8, site="iad1", outcome="complete", reasoning_tokens=1)


async def test_what_a_site_asks_for_a_function_is_its_accounts_without_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = "/client/v4/accounts/function-hello/ai/run/ember", b'{"prompt": "Hi"}'
    accounts = [{"name": "acme", "models": ["emb*"]}]

    def signed(secret: str = "s", path: str = path, **more: str) -> dict[str, str]:
        hop = Hop("POST", path, "id", FOR_ROUTERS)
        return {REQUEST_ID: "id", HOP: sign_hop(secret, time.time(), hop, body), ACCOUNT: "acme", **more}

    async with sites("ams1") as fakes, metered(fakes, tmp_path, monkeypatch, accounts=accounts) as running:
        told = {USAGE.replace("-", "_"): "7,3,20,4", WORK.replace("-", "_"): "40,20,20000"}
        fakes[0].behave = answer(200, {"result": {}}, **told)

        async def ask(headers: dict[str, str], body: bytes = body, path: str = path) -> tuple[int, str]:
            async with running.http.post(running.url + path, data=body, headers=headers) as response:
                return response.status, await response.text()

        assert (await ask(signed()))[0] == 200
        assert fakes[0].seen[-1].headers[ACCOUNT] == "acme"
        assert await usage(running) == [used(20, reasoning_tokens=4)]
        for headers, status, why in (
            (signed("guessed"), 401, "this needs a key"),
            ({ACCOUNT: "acme"}, 401, "this needs a key"),
            # a client of a router needs a key or an account
            (signed(**{HOPS: "1", ACCOUNT: ""}), 401, "this needs a key"),
            (signed("guessed", **{HOPS: "1"}), 401, "this needs a key"),
            (signed(authorization="Bearer guessed"), 401, "this key is unknown"),
        ):
            refused = await ask(headers)
            assert (refused[0], why in refused[1]) == (status, True), headers
        assert (await ask(signed(), b'{"prompt": "other"}'))[0] == 403
        other = path.replace("ember", "other")
        refused = await ask(signed(path=other), path=other)
        assert (refused[0], "not available to the account acme" in refused[1]) == (403, True)
        assert len(fakes[0].seen) == 1


async def test_usage_is_written_without_a_request(fakes: list[FakeSite], running: Router, tmp_path: Path) -> None:
    fakes[0].behave = continued_stream(2)
    async with running.chat(headers=ACME) as response:
        await response.read()
    store = SqliteStore(tmp_path / "usage.sqlite")
    await eventually(lambda: [row["requests"] for row in store.usage(UsageQuery(by=("account",)))] == [1])
    store.close()


async def test_retries_of_refused_requests_are_one_request(fakes: list[FakeSite], running: Router) -> None:
    fakes[0].behave = refuse("overloaded")
    told = {USAGE.replace("-", "_"): "7,3,20,4", WORK.replace("-", "_"): "40,20,20000"}
    fakes[1].behave = answer(200, {"choices": []}, **told)
    async with running.chat(headers=ACME, stream=False) as response:
        assert response.status == 200
        assert not {USAGE, WORK} & {*response.headers}, "clients do not get these headers"
    assert await usage(running) == [used(20, reasoning_tokens=4)]
    fakes[1].behave = answer(400, {"error": {"message": "no"}})
    async with running.chat(headers=ACME, stream=False) as response:
        assert response.status == 400
    assert (await usage(running))[0]["requests"] == 1, "a refused request is not recorded"


async def test_a_client_that_leaves_has_what_it_was_sent(fakes: list[FakeSite], running: Router) -> None:
    fakes[0].behave = continued_stream(8, until=3, ending=fall_silent)
    response = await running.chat(headers=ACME)
    received = b""
    while received.count(b"data: {") < 3:
        received += await response.content.readany()
    response.close()
    async with asyncio.timeout(60):
        while not (found := await usage(running, by="account,model,outcome")):
            await asyncio.sleep(0.02)
    assert found == [used(3, outcome="cut")]


async def test_an_account_sees_its_own_usage_and_an_admin_key_everybodys(
    fakes: list[FakeSite], running: Router
) -> None:
    fakes[0].behave = continued_stream(2)
    for headers in (ACME, {"authorization": "Bearer al"}, BOB):
        async with running.chat(headers=headers) as response:
            await response.read()
    own = await usage(running, ACME, by="account,key")
    assert [(row["account"], row["key"]) for row in own] == [("acme", "al"), ("acme", "alice")]
    assert [row["account"] for row in await usage(running, BOB)] == ["bob"]
    assert [row["account"] for row in await usage(running)] == ["acme", "bob"]
    assert [row["account"] for row in await usage(running, account="bob")] == ["bob"]
    (total,) = await usage(running, by="")
    assert ("account" in total, total["requests"]) == (False, 3)
    url = running.url + "/usage"
    for query, headers, status in (
        ({"account": "acme"}, BOB, 403),
        ({"by": "cost"}, ROOT, 400),
        ({"format": "xml"}, ROOT, 400),
        ({"from": "yesterday"}, ROOT, 400),
        ({}, {}, 401),
    ):
        async with running.http.get(url, params=query, headers=headers) as response:
            assert response.status == status, query
    assert await usage(running, **{"from": "2999-01-01"}) == []
    async with running.http.get(url, params={"format": "csv", "by": "account"}, headers=ROOT) as response:
        assert response.content_type == "text/csv"
        rows = [*csv.DictReader(io.StringIO(await response.text()))]
    assert [(row["account"], row["requests"], row["output_tokens"]) for row in rows] == [
        ("acme", "2", "4"),
        ("bob", "1", "2"),
    ]


async def test_an_adapter_and_the_bytes_of_bodies_are_written_down(fakes: list[FakeSite], running: Router) -> None:
    for fake in fakes:
        fake.status_fields = {"models": (model_status(aliases=("@x/ember:8b",)),)}
        fake.behave = continued_stream(2)
    async with asyncio.timeout(60):
        await running.until(lambda: running.proxy.selector.own_name("@x/ember:8b") == "ember")
    num_bytes = 0
    for more in (
        {"model": "ember:french"},
        {"lora": "french"},
        {"model": "@x/ember:8b:french"},
        {"model": "@x/ember:8b"},
    ):
        async with running.chat(headers=ACME, **more) as response:
            num_bytes += len(await response.read())
    query = {"by": "model,adapter", "format": "csv"}
    async with running.http.get(running.url + "/usage", params=query, headers=ROOT) as response:
        plain, french = csv.DictReader(io.StringIO(await response.text()))
    assert [(row["model"], row["adapter"], row["requests"]) for row in (plain, french)] == [
        ("ember", "", "1"),
        ("ember", "french", "3"),
    ]
    assert int(plain["bytes_out"]) + int(french["bytes_out"]) == num_bytes
    bodies = sum(len(body) for fake in fakes for body in fake.bodies)
    assert int(plain["bytes_in"]) + int(french["bytes_in"]) == bodies
    assert (french["device_s"], french["drafted_tokens"], french["accepted_tokens"]) == ("0.006", "12", "6")


async def test_no_spreadsheet_takes_a_models_name_for_a_formula(fakes: list[FakeSite], running: Router) -> None:
    fakes[0].behave = continued_stream(1)
    async with running.chat(headers=ACME, model='=HYPERLINK("x")') as response:
        await response.read()
    url = running.url + "/usage"
    async with running.http.get(url, params={"format": "csv", "by": "model"}, headers=ROOT) as response:
        (row,) = csv.DictReader(io.StringIO(await response.text()))
    assert row["model"] == '\'=HYPERLINK("x")'


async def test_without_a_ledger_usage_says_where_one_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites("ams1") as fakes, router(fakes) as running, running.http.get(running.url + "/usage") as response:
        assert (response.status, "ledger.directory" in await response.text()) == (404, True)


async def test_a_daily_quota_holds_under_parallel_requests_and_over_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accounts = [{"name": "acme", "tokens_per_day": 100}]
    for is_again in (False, True):
        async with sites("ams1", "iad1") as fakes, metered(fakes, tmp_path, monkeypatch, accounts=accounts) as running:
            fakes[0].behave = continued_stream(8)

            async def ask(running: Router = running) -> int:
                async with running.chat(headers=ACME, max_tokens=8) as response:
                    await response.read()
                    if response.status == 429:
                        assert int(response.headers["retry-after"]) > 0
                        assert "acme may have 100 tokens a day" in await response.text()
                    return response.status

            statuses = await asyncio.gather(*(ask() for _ in range(30)))
            (row,) = await usage(running, account="acme")
            used = row["prompt_tokens"] + row["output_tokens"]
            assert used <= 100
            assert (200 in statuses, 429 in statuses) == (not is_again or used == 100, True)
            while await ask() == 200:
                pass
            (row,) = await usage(running, account="acme")
            assert 100 - 2 * (PROMPT_TOKENS + 8) < row["prompt_tokens"] + row["output_tokens"] <= 100
            async with running.chat(headers=BOB) as response:
                assert response.status == 200


async def test_an_alias_costs_what_its_model_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with sites("ams1", "iad1") as fakes, metered(fakes, tmp_path, monkeypatch) as running:
        for fake in fakes:
            fake.status_fields = {"models": (model_status(aliases=("@x/ember",)),)}
            fake.behave = continued_stream(8)
        async with asyncio.timeout(60):
            await running.until(lambda: running.proxy.selector.own_name("@x/ember") == "ember")
        async with running.chat(headers=ACME, model="@x/ember") as response:
            await response.read()
        assert await usage(running) == [used(8, reasoning_tokens=1)]

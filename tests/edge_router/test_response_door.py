"""Responses at the router: each request is admitted before its body is read, and counts once against its account's limits."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.edge_router.fakes import FakeSite, Router, router, sites
from tests.edge_router.test_kept_responses import answered
from tests.edge_router.test_limits import ALICE, BOB

pytestmark = pytest.mark.process

ASKED = {"model": "ember", "input": "hello", "store": True}


@asynccontextmanager
async def limited(folder: Path, **limits: float) -> AsyncIterator[tuple[FakeSite, Router]]:
    tables = {"tenant_limits": limits, "responses": {"directory": str(folder)}}
    async with sites("ams1") as fakes, router(fakes, tables=tables, idle_timeout_s=0.3) as running:
        fakes[0].behave = answered
        yield fakes[0], running


def ask(running: Router, headers: dict[str, str] = ALICE, **fields: Any) -> Any:
    return running.http.post(f"{running.url}/v1/responses", json={**ASKED, **fields}, headers=headers)


async def first_line(running: Router, more: bytes = b"") -> bytes:
    """Return the first line of the response to a request whose body never arrives."""
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer alice\r\ncontent-length: 5000\r\n"
    writer.write(head + b"\r\n{" + more)
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    return line


async def test_a_request_that_is_refused_is_refused_before_its_body_is_read(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_min=1) as (_site, running):
        async with ask(running) as response:
            assert response.status == 200
        assert b" 429 " in await first_line(running)
        running.proxy.admission.is_draining = True
        assert b" 503 " in await first_line(running)


async def test_a_body_that_pauses_has_the_limits_of_any_body(tmp_path: Path) -> None:
    async with limited(tmp_path) as (site, running):
        assert b" 408 " in await first_line(running)
        assert site.bodies == []


async def test_what_is_read_cancelled_and_deleted_by_id_counts_as_requests(tmp_path: Path) -> None:
    async with limited(tmp_path, requests_per_min=5) as (_site, running):
        async with ask(running) as response:
            url = f"{running.url}/v1/responses/{(await response.json())['id']}"
        statuses = []
        for method, path in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", ""), ("GET", "")):
            async with running.http.request(method, url + path, headers=ALICE) as response:
                statuses.append(response.status)
        assert statuses == [200, 200, 400, 200, 429]
        async with running.http.get(url, headers=BOB) as response:
            assert response.status == 404


@pytest.mark.parametrize("spelled", ["x-api-key", "api-key"])
async def test_a_key_in_the_header_of_another_dialect_owns_what_it_has_stored(spelled: str, tmp_path: Path) -> None:
    async with limited(tmp_path) as (_site, running):
        async with ask(running, {spelled: "alice"}) as response:
            url = f"{running.url}/v1/responses/{(await response.json())['id']}"
        statuses = []
        for headers in ({spelled: "alice"}, ALICE, {spelled: "bob"}, BOB, {}):
            async with running.http.get(url, headers=headers) as response:
                statuses.append(response.status)
        assert statuses == [200, 200, 404, 404, 404]


async def test_a_required_key_may_be_in_the_header_of_another_dialect(tmp_path: Path) -> None:
    keys = [{"name": "alice", "key_sha256": hashlib.sha256(b"alice").hexdigest()}]
    tables: dict[str, Any] = {"responses": {"directory": str(tmp_path)}, "keys": keys, "door": {"require_key": True}}
    async with sites("ams1") as fakes, router(fakes, tables=tables) as running:
        fakes[0].behave = answered
        statuses = []
        for key in ("alice", "bob"):
            async with running.http.post(
                f"{running.url}/openai/v1/responses", json=ASKED, headers={"api-key": key}
            ) as response:
                statuses.append(response.status)
        assert statuses == [200, 401]


async def test_a_response_is_one_request_at_work_also_in_the_background(tmp_path: Path) -> None:
    async with limited(tmp_path, max_open=1) as (site, running):
        async with ask(running) as response:
            assert response.status == 200, "the request is not counted twice"
        go_on = asyncio.Event()

        async def slow(site: FakeSite, request: Any) -> Any:
            await go_on.wait()
            return await answered(site, request)

        site.behave = slow
        limits = running.proxy.admission.limits
        for how in ({"background": True}, {"background": True, "stream": True}):
            asking = asyncio.create_task(read(ask(running, **how)))
            await running.until(lambda: limits.num_open == 1 and site.active == 1)
            async with ask(running) as response:
                assert response.status == 429
            go_on.set()
            assert await asking == 200
            await running.until(lambda: limits.num_open == 0)
            go_on.clear()


async def read(asking: Any) -> int:
    async with asking as response:
        await response.read()
        return int(response.status)


async def test_a_streamed_background_response_leaves_its_account_room_for_another(tmp_path: Path) -> None:
    async with limited(tmp_path, max_open=2) as (site, running):
        go_on = asyncio.Event()

        async def slow(site: FakeSite, request: Any) -> Any:
            await go_on.wait()
            return await answered(site, request)

        site.behave = slow
        limits = running.proxy.admission.limits
        asking = [asyncio.create_task(read(ask(running, background=True, stream=True))) for _ in range(2)]
        await running.until(lambda: site.active == 2)
        assert limits.num_open == 2
        go_on.set()
        assert await asyncio.gather(*asking) == [200, 200]
        await running.until(lambda: limits.num_open == 0)

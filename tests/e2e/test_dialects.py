"""The dialects through a router and its sites: in each dialect an answer continues without a difference when its site is killed."""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from load_tests import random_checkpoint
from load_tests.local_network import LocalNetwork
from load_tests.random_checkpoint import Shape
from load_tests.scenarios.clients import without_end
from load_tests.scenarios.site_death import kill, stream_counts, wait_until_healthy
from tests.e2e.conftest import NO_STANDBY
from tests.runtime.generation.test_resumption import told_blocks

SLOW = Shape(512, 1536, 4, 8, 4, 64)
STRUCK_AT = 4000  # bytes of an answer after which its site is killed; an answer has tens of thousands
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "slow", "max_tokens": 300, "messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"model": "slow", "max_output_tokens": 300, "input": "Hi", "temperature": 0},
}


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with tempfile.TemporaryDirectory(prefix="dialects-") as folder:
        without_end(random_checkpoint.write(Path(folder) / "slow", SLOW))
        source = f'\n[[models]]\nname = "slow"\nsource = "{Path(folder) / "slow"}"\n'
        with LocalNetwork(num_sites=2, site_settings=source, engine_settings=NO_STANDBY) as running:
            yield running


async def heard(network: LocalNetwork, path: str, *, kill_after: int | None = None) -> list[dict[str, Any]]:
    """Return the events of an answer. Its site is killed after `kill_after` bytes."""
    body, struck = bytearray(), kill_after is None
    asked = {**ASKED[path], "stream": True, "temperature": 0}
    async with aiohttp.ClientSession() as session, session.post(network.url + path, json=asked) as response:
        assert response.status == 200, await response.text()
        async for chunk in response.content.iter_any():
            body += chunk
            if not struck and kill_after is not None and len(body) > kill_after:
                struck = True
                await asyncio.to_thread(kill, network, response.headers["x-pilotlight-site"])
    return told_blocks(bytes(body))


def said(events: list[dict[str, Any]]) -> list[Any]:
    """Return the events without what differs between equal answers: names, times and usage."""
    text = json.dumps(events)
    first = events[0].get("message") or events[0]["response"]
    for name in (first["id"], first["id"].partition("_")[2], first["id"].partition("_")[2][:18]):
        text = text.replace(name, "ID")
    return [_plain(event) for event in json.loads(text)]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in ("usage", "created_at")}
    return [_plain(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", [pytest.param("/v1/messages", marks=pytest.mark.slow), "/v1/responses"])
def test_a_stream_outlives_its_site(network: LocalNetwork, path: str) -> None:
    undisturbed = asyncio.run(heard(network, path))
    before = stream_counts(network)
    disturbed = asyncio.run(heard(network, path, kill_after=STRUCK_AT))
    after = stream_counts(network)
    assert after["continued"] - before["continued"] == 1, "the answer ended before the site was killed"
    assert after["lost"] == before["lost"]
    assert said(disturbed) == said(undisturbed)
    wait_until_healthy(network)


def test_responses_are_kept_at_the_router_whichever_site_answers(network: LocalNetwork) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession(network.url) as session:

            async def post(**fields: Any) -> Any:
                async with session.post("/v1/responses", json={"model": "ember", **fields}) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            async def get(response_id: str) -> Any:
                async with session.get(f"/v1/responses/{response_id}") as response:
                    return response.status, await response.json()

            first = await post(input="What is the airport code of Lisbon?")
            assert "LIS" in first["output"][0]["content"][0]["text"]
            assert await get(first["id"]) == (200, first)
            second = await post(input="And of Oslo?", previous_response_id=first["id"])
            assert second["previous_response_id"] == first["id"]
            assert second["usage"]["input_tokens"] > first["usage"]["total_tokens"]
            started = await post(input="What is 17 plus 25?", background=True)
            while (made := (await get(started["id"]))[1])["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
            assert made["status"] == "completed"
            assert "42" in made["output"][0]["content"][0]["text"]

    asyncio.run(ask())

"""All clients leave a site at once: its sequences, KV blocks and permits become free, and later answers are unchanged."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.asgi import eventually
from tests.e2e.test_engine_death import CHAT, WEATHER, asked, end, write_site
from tests.runtime.test_real_engine import Process

pytestmark = [pytest.mark.process, pytest.mark.long]

CLIENTS = 100
LONG = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}
GAUGES = (
    "pilotlight_inflight_requests", "pilotlight_reserved_tokens", "vllm:num_requests_running", "vllm:num_requests_waiting",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("site")
    started = Process(write_site(folder, "embedded:ember", continue_within_s=60.0), folder / "log")
    yield started
    end(started)


class Gauges:
    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def value(self, name: str) -> float:
        text = (await self._client.get("/metrics")).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE))

    async def are_zero(self) -> bool:
        return not any([await self.value(name) for name in GAUGES])


async def sent(url: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    raw = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(head.encode() + raw)
    return reader, writer


PHASES: dict[str, dict[str, Any]] = {
    "queued and decoding": LONG,
    "computing prompts": {**LONG, "messages": [{"role": "user", "content": "word " * 1500}]},
    "grammars": {"tools": [WEATHER], "tool_choice": "required", "temperature": 0},
}


@pytest.mark.parametrize("phase", PHASES)
async def test_clients_that_all_leave_at_once_leave_nothing_behind(site: Process, phase: str) -> None:
    messages = [{"role": "user", "content": "What is the airport code of Lisbon?"}]
    question = {"model": "ember", "messages": messages, "temperature": 0}
    async with httpx.AsyncClient(base_url=site.url, timeout=120.0) as client:
        gauges = Gauges(client)
        before = (await client.post(CHAT, json=question)).json()["choices"]
        await eventually(gauges.are_zero)
        connections = [await sent(site.url, {**asked(f"Number {i}"), **PHASES[phase]}) for i in range(CLIENTS)]

        async def are_at_work() -> bool:
            return await gauges.value("vllm:num_requests_running") > 0

        await eventually(are_at_work)
        for _, writer in connections:
            writer.transport.abort()
        await eventually(gauges.are_zero)
        assert (await client.post(CHAT, json=question)).json()["choices"] == before


def test_nothing_was_logged_with_a_traceback(site: Process) -> None:
    assert "Traceback" not in site.log.read_text()

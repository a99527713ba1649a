"""Many clients leave at once, in each phase of a request: everything they held is freed, and the next client is served (I2, I6)."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.asgi import eventually
from tests.fakes import says
from tests.runtime.conftest import Site, SiteMaker

pytestmark = pytest.mark.process

CLIENTS = 100
PATH = "/ai/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 16}
NEVER_S = 3600.0


async def connected(site: Site) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection after sending a request on it."""
    place = urlsplit(site.url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    body = json.dumps(HELLO).encode()
    head = f"POST {PATH} HTTP/1.1\r\nhost: {place.netloc}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    return reader, writer


async def storm(site: Site) -> None:
    """Connect clients, and disconnect them when all their requests are in progress."""
    before = len(asyncio.all_tasks())
    connections = [await connected(site) for _ in range(CLIENTS)]
    await eventually(lambda: site.admission.inflight == CLIENTS)
    for _, writer in connections:
        writer.transport.abort()
        await writer.wait_closed()
    await site.is_idle()
    await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def assert_next_is_served(site: Site) -> None:
    site.engine.script = says("Hello, world")
    async with aiohttp.ClientSession() as session, session.post(site.url + PATH, json=HELLO) as answer:
        assert (await answer.read()).rstrip().endswith(b"data: [DONE]")


@pytest.mark.parametrize("tokens", [0, 5])
async def test_a_storm_while_prompts_or_answers_are_computed_leaves_nothing(server: Site, tokens: int) -> None:
    server.engine.script = [*says("Hello"[:tokens], finish=None), NEVER_S] if tokens else [NEVER_S]
    await storm(server)
    assert sorted(server.engine.aborted) == sorted(submit.sequence_id for submit in server.engine.submits)
    await assert_next_is_served(server)


async def test_a_storm_while_the_model_wakes_leaves_nothing(make_server: SiteMaker, model_directory: Path) -> None:
    models = [{"name": "tiny", "source": str(model_directory), "residency": "disk"}]
    async with make_server(models=models, limits={"max_waking": CLIENTS}) as site:
        await eventually(lambda: site.launcher.hosts)
        site.engine.load_gate = gate = asyncio.Event()
        await storm(site)
        assert not site.engine.submits
        gate.set()
        await assert_next_is_served(site)
        await site.is_idle()

"""A router that is repeatedly killed with kill -9 under a batch: each request is answered and billed once."""

import asyncio
import json
import random
import sqlite3
from collections import Counter
from pathlib import Path

import aiohttp
import openai
import pytest
from aiohttp import web

from tests.edge_router.fakes import FakeSite, sites
from tests.edge_router.services.batches.test_batches import echo, ended, lines, read
from tests.edge_router.test_serve import network_file, process, ready

NUM_REQUESTS, NUM_KILLS = 80, 5


@pytest.mark.process
@pytest.mark.slow
async def test_a_batch_outlives_routers_that_are_killed_and_is_billed_once(tmp_path: Path) -> None:
    rng = random.Random(4)

    async def take_a_while(site: FakeSite, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return await echo(site, request)

    async with sites("ams1") as fakes, aiohttp.ClientSession() as session:
        fakes[0].behave, fakes[0].secret = take_a_while, "a secret of sixteen bytes or more"
        file = network_file(tmp_path, fakes[0].url, extra=f'[ledger]\ndirectory = "{tmp_path / "ledger"}"')
        name, num_cut = "", 0
        for turn in range(NUM_KILLS + 1):
            async with (
                process(file, PILOTLIGHT_HOP_SECRET=fakes[0].secret) as (running, url),
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as made,
            ):
                await ready(session, url)
                if not name:
                    asked = await made.files.create(file=lines(*map(str, range(NUM_REQUESTS))), purpose="batch")
                    batch = await made.batches.create(
                        input_file_id=asked.id, endpoint="/v1/chat/completions", completion_window="24h"
                    )
                    name = batch.id
                if turn < NUM_KILLS:
                    target = len(fakes[0].seen) + rng.randrange(4, 12)
                    async with asyncio.timeout(60):
                        while len(fakes[0].seen) < target:
                            await asyncio.sleep(0.001)
                    num_cut += fakes[0].active > 0
                    running.kill()
                    await running.wait()
                    continue
                done = await ended(made, name)
                assert (done.status, done.request_counts.completed) == ("completed", NUM_REQUESTS)
                assert {*await read(made, done.output_file_id)} == {str(i) for i in range(NUM_REQUESTS)}
                running.terminate()  # the last router is stopped in order, so it writes ended requests
                await running.wait()
        assert num_cut, "no router was killed while a request was under way"
        told = Counter(json.loads(body)["messages"][0]["content"] for body in fakes[0].bodies)
        assert max(told.values()) > 1, "nothing had to be asked again"
    records = sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")
    assert records.execute("SELECT COUNT(*), SUM(output_tokens) FROM usage").fetchone() == (
        NUM_REQUESTS,
        5 * NUM_REQUESTS,
    )
    records.close()

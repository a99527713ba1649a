"""A client that leaves at any moment frees everything it held (I2, I6)."""

import asyncio

import pytest

from tests.asgi import call, eventually, start
from tests.fakes import says
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
RUN = "/client/v4/accounts/a/ai/run/tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, RUN])
async def test_leaving_before_the_first_byte_aborts(site: Site, stream: bool, path: str) -> None:
    site.engine.script = [30]
    body = {**HELLO, "stream": stream} if path == CHAT else {"prompt": "Hi", "stream": stream}
    exchange = start(site.app, path, body)
    await eventually(lambda: site.engine.open)
    assert site.admission.inflight == 1
    exchange.disconnect()
    await exchange.done()
    assert not exchange.is_started
    assert site.engine.aborted == [site.engine.submits[0].sequence_id]
    assert site.admission.inflight == 0


async def test_leaving_in_mid_stream_aborts(site: Site) -> None:
    site.engine.script = [*says("Hello", finish=None), 30]
    exchange = start(site.app, CHAT, {**HELLO, "stream": True})
    await exchange.until(b"ello")
    exchange.disconnect()
    await exchange.done()
    assert site.engine.aborted == [site.engine.submits[0].sequence_id]
    assert site.admission.inflight == 0
    assert sum(site.admission.reserved.values()) == 0


async def test_leaving_while_the_model_loads_leaves_the_load_to_others(make_site: SiteMaker, model_directory) -> None:
    models = [{"name": "tiny", "source": str(model_directory), "residency": "disk"}]
    async with make_site(models=models) as site:
        await eventually(lambda: site.launcher.hosts)
        site.engine.load_gate = asyncio.Event()
        leaver, stayer = start(site.app, CHAT, HELLO), start(site.app, CHAT, HELLO)
        demand = site.app.site.models.states["tiny"].demand
        await eventually(lambda: demand.queued == 2)
        leaver.disconnect()
        await leaver.done()
        assert site.admission.inflight == 1
        site.engine.load_gate.set()
        assert (await stayer.done()).status == 200
        assert site.engine.loaded == ["tiny"]
        assert (demand.queued, demand.waiters, demand.users) == (0, 0, 0)


async def test_after_many_mixed_ends_every_counter_is_zero(site: Site) -> None:
    may_end = asyncio.Event()
    site.engine.script = [*says("Hel", finish=None), may_end, *says("lo")]
    exchanges = [start(site.app, CHAT, {**HELLO, "stream": bool(i % 2)}) for i in range(24)]
    await eventually(lambda: len(site.engine.open) > 5)
    for exchange in exchanges[::3]:
        exchange.disconnect()
    may_end.set()
    for exchange in exchanges:
        await exchange.done()
    await site.is_idle()
    assert not site.app.site.fleet.hosts[0].progress.has_work
    assert (await call(site.app, CHAT, HELLO)).status == 200

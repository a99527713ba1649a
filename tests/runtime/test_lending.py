"""Prompts that a site computes for others: only while it is idle, and only for sites with its network's secret."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from pilotlight.engine.api.protocol import PRIORITIES, ModelLoad, TokenOutput
from pilotlight.runtime.api.routes.lending_routes import _PromptRoute
from pilotlight.runtime.dispatch.lending import MOST_PROMPTS, LentPrompt
from pilotlight.sites.config import ConfigError, parse
from pilotlight.sites.site import SiteConfig
from pilotlight.wire.hop.headers import HOP, REQUEST_ID, Hop, sign_hop
from pilotlight.wire.hop.lending import (
    LENDING_PATH,
    PROBE_BYTES,
    PROBE_PATH,
    PROMPT_PATH,
    BorrowedPrompt,
    encode_line,
)
from tests.asgi import Exchange, call, eventually, start
from tests.fakes import FakeLauncher, ids, says
from tests.runtime.conftest import Site, SiteMaker, site_config
from tests.runtime.two_devices import CHAT, ask

SECRET = "a secret of this test's network"
LENDS = {"lend_at": "127.0.0.1:9300", "kv_host_gib": 0.1}


@pytest.fixture
async def lender(make_site: SiteMaker) -> AsyncIterator[Site]:
    launcher = FakeLauncher()
    launcher.peer_address = "ipc:///blocks"
    async with make_site(launcher=launcher, hop_secret=SECRET, engine=LENDS) as site:
        site.engine.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, total_blocks=64)
        yield site
        await site.is_idle()


def signed(method: str, path: str, body: bytes = b"") -> dict[str, str]:
    return {HOP: sign_hop(SECRET, time.time(), Hop(method, path, "r1", "ams1"), body), REQUEST_ID: "r1"}


async def get(site: Site, path: str) -> Exchange:
    return await Exchange(site.app, "GET", path, b"", signed("GET", path)).done()


def borrow(site: Site, **more: Any) -> Exchange:
    fields = {"model": "tiny", "hand_over": "ab" * 16, "token_ids": tuple(range(65)), "salt": b"whose"}
    body = encode_line(BorrowedPrompt(**(fields | more)))
    return Exchange(site.app, "POST", PROMPT_PATH, body, signed("POST", PROMPT_PATH, body))


async def lent(site: Site, outcome: str, model: str = "tiny") -> bool:
    line = f'pilotlight_prompts_lent_total{{model_name="{model}",outcome="{outcome}"}} 1.0'
    return line in (await call(site.app, "/metrics")).body.decode()


def computed(cached: int = 16) -> list[Any]:
    return [TokenOutput("", ids("x"), finish_reason="length", num_cached_tokens=cached, device_us=700)]


async def test_an_idle_site_computes_a_prompt(lender: Site) -> None:
    assert (await get(lender, LENDING_PATH)).json == {"models": {"tiny": 1000.0}, "why_not": "", "queue_s": 0.0}
    assert len((await get(lender, PROBE_PATH)).body) == PROBE_BYTES
    lender.engine.script = computed()
    answer = await borrow(lender).done()
    assert answer.status == 200
    first, last = [json.loads(line) for line in answer.body.splitlines()]
    assert first == {"port": 9300}
    assert last == {"num_cached_tokens": 16, "device_us": 700}
    (submit,) = lender.engine.submits
    assert (submit.sequence_id, submit.salt, submit.prompt_token_ids) == ("ab" * 16, b"whose", tuple(range(65)))
    assert (submit.hands_over, submit.priority, submit.sampling.max_tokens) == (True, PRIORITIES[-1], 1)
    assert await lent(lender, "computed")


async def test_no_message_without_the_networks_secret_is_accepted(lender: Site) -> None:
    body = encode_line(BorrowedPrompt("tiny", "ab" * 16, (1, 2), b""))
    for method, path in (("GET", LENDING_PATH), ("GET", PROBE_PATH), ("POST", PROMPT_PATH)):
        plain = await Exchange(lender.app, method, path, body, {}).done()
        assert (plain.status, plain.json["error"]["code"]) == (403, "forbidden")
    other = {HOP: sign_hop("another" * 4, time.time(), Hop("POST", PROMPT_PATH, "r1", "ams1"), body), REQUEST_ID: "r1"}
    assert (await Exchange(lender.app, "POST", PROMPT_PATH, body, other).done()).status == 403
    assert not lender.engine.submits


async def test_a_site_with_work_of_its_own_declines(lender: Site) -> None:
    gate = asyncio.Event()
    lender.engine.script = [*says("H", finish=None), gate, *says("i")]
    own = start(lender.app, CHAT, ask(stream=True))
    await own.until(b"H")
    assert (await get(lender, LENDING_PATH)).json["models"] == {}
    refused = await borrow(lender).done()
    assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
    assert await lent(lender, "declined")
    gate.set()
    await own.done()
    assert "tiny" in (await get(lender, LENDING_PATH)).json["models"]


async def test_a_borrowed_prompt_gives_way_to_the_first_client(lender: Site) -> None:
    lender.engine.scripts = [[asyncio.Event()]]
    prompt = borrow(lender)
    await eventually(lambda: lender.engine.open)
    (borrowed,) = lender.engine.open
    lender.engine.script = [*says("Hi"), 0.1]
    gate = asyncio.Event()
    lender.engine.script = [*says("H", finish=None), gate, *says("i")]
    own = start(lender.app, CHAT, ask(stream=True))
    await own.until(b"H")
    await prompt.done()
    assert b"num_cached_tokens" not in prompt.body
    assert borrowed in lender.engine.aborted
    assert await lent(lender, "given_up")
    gate.set()
    await own.done()


async def test_a_few_prompts_at_a_time_and_none_for_a_client_that_left(lender: Site) -> None:
    lender.engine.scripts = [[asyncio.Event()] for _ in range(MOST_PROMPTS)]
    prompts = [borrow(lender, hand_over=f"{i:032x}") for i in range(MOST_PROMPTS)]
    await eventually(lambda: len(lender.engine.open) == MOST_PROMPTS)
    progress = lender.app.site.models.states["tiny"].replicas[0].host.progress
    assert progress.has_work, "a host that hangs at it is missed"
    assert (await borrow(lender, hand_over="cd" * 16).done()).status == 503
    for prompt in prompts:
        prompt.disconnect()
        await prompt.done()
    await eventually(lambda: not lender.engine.open)
    assert not progress.has_work
    left = f'pilotlight_prompts_lent_total{{model_name="tiny",outcome="left"}} {MOST_PROMPTS}.0'
    assert left in (await call(lender.app, "/metrics")).body.decode()
    lender.engine.script = computed()
    assert (await borrow(lender).done()).status == 200


async def test_an_offer_has_the_seconds_that_other_sites_prompts_will_take(lender: Site) -> None:
    lender.engine.scripts = [[asyncio.Event()], [asyncio.Event()]]
    prompts = [borrow(lender, hand_over=f"{i:032x}") for i in range(2)]
    await eventually(lambda: len(lender.engine.open) == 2)
    assert (await get(lender, LENDING_PATH)).json["queue_s"] == pytest.approx(2 * 65 / 1000)
    for prompt in prompts:
        prompt.disconnect()
        await prompt.done()
    assert (await get(lender, LENDING_PATH)).json["queue_s"] == 0.0


async def test_what_is_no_prompt_is_refused_by_name(lender: Site) -> None:
    assert (await borrow(lender, model="nope").done()).status == 503
    assert await lent(lender, "declined", "unknown"), "unknown model names make no labels"
    for more in ({"hand_over": "x"}, {"hand_over": "AB" * 16}, {"salt": b"x" * 65}):
        refused = await borrow(lender, **more).done()
        assert (refused.status, refused.json["error"]["code"]) == (400, "invalid_request")
    body = b"[]"
    garbled = await Exchange(lender.app, "POST", PROMPT_PATH, body, signed("POST", PROMPT_PATH, body)).done()
    assert (garbled.status, garbled.json["error"]["code"]) == (400, "malformed_json")
    assert not lender.engine.submits


async def test_a_site_that_drains_lends_no_more(lender: Site) -> None:
    lender.engine.scripts = [[asyncio.Event()]]
    prompt = borrow(lender)
    await eventually(lambda: lender.engine.open)
    lender.app.site.admission.drain()
    await prompt.done()
    assert not lender.engine.open
    assert (await get(lender, LENDING_PATH)).json == {"models": {}, "why_not": "it is shutting down", "queue_s": 0.0}
    assert (await borrow(lender).done()).status == 503


async def test_a_host_that_dies_is_no_answer(lender: Site) -> None:
    lender.engine.scripts = [[asyncio.Event()]]
    prompt = borrow(lender)
    await eventually(lambda: lender.engine.open)
    lender.launcher.hosts[-1].die()
    await prompt.done()
    assert b"num_cached_tokens" not in prompt.body
    assert await lent(lender, "failed")


async def test_a_site_that_does_not_lend_has_no_such_path(make_site: SiteMaker) -> None:
    async with make_site(hop_secret=SECRET) as site:
        assert (await get(site, LENDING_PATH)).status == 404


def test_what_cannot_be_is_refused_at_the_start(model_directory: Any) -> None:
    def problem(**engine: Any) -> str:
        with pytest.raises(ConfigError) as refused:
            site_config(model_directory, engine=engine)
        return str(refused.value)

    at = {"site": "iad1", "url": "http://10.0.0.5:8791"}
    assert "kv_host_gib above 0" in problem(lend_at="127.0.0.1:9300")
    assert "kv_host_gib above 0" in problem(lenders=[at])
    assert "65535" in problem(lend_at="127.0.0.1:65535", kv_host_gib=0.1, devices=["cpu", "cpu"])
    assert "'iad1' is used twice" in problem(lenders=[at, at], kv_host_gib=0.1)
    assert "is this site" in problem(lenders=[{**at, "site": "ams1"}], kv_host_gib=0.1)
    assert "without a path" in problem(lenders=[{**at, "url": "http://10.0.0.5/x"}], kv_host_gib=0.1)
    assert parse(SiteConfig, {**_BARE, "engine": {"lenders": [at], "kv_host_gib": 0.1}}, "test").engine.shares_blocks


_BARE = {
    "name": "ams1",
    "place": {"city": "A", "latitude": 0.0, "longitude": 0.0},
    "listen": {"port": 0},
    "models": [{"name": "m", "source": "embedded:ember"}],
}


async def test_a_site_without_the_secret_does_not_start(make_site: SiteMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PILOTLIGHT_HOP_SECRET", raising=False)
    with pytest.raises(ConfigError, match="PILOTLIGHT_HOP_SECRET"):
        async with make_site(engine=LENDS):
            pass


async def test_blocks_are_served_at_the_port_of_the_host_that_computes_them() -> None:
    class Lends:
        @asynccontextmanager
        async def lend(self, prompt: BorrowedPrompt) -> AsyncIterator[LentPrompt]:
            yield LentPrompt(2, nothing())

    async def nothing() -> AsyncIterator[TokenOutput]:
        for output in ():
            yield output

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    route = _PromptRoute(cast("Any", Lends()), 9300)
    await route._compute(BorrowedPrompt("tiny", "ab" * 16, (1, 2), b""), send)
    assert json.loads(sent[1]["body"]) == {"port": 9302}

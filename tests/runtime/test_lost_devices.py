"""Deaths of engine hosts on a site with two devices: the other host continues the work (I1, I3, I6)."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

from pilotlight.engine.api.protocol import Submit
from tests.asgi import Exchange, call, eventually, start
from tests.fakes import FakeLauncher, says
from tests.runtime.conftest import SiteMaker
from tests.runtime.test_continuation import TEXT, Mortal
from tests.runtime.two_devices import CHAT, FAST, QUICK, TWO, Pair, ask, both_awake, entries, even, make_pair

__all__ = ["entries", "even", "make_pair"]


class Twins:
    """Launchers for two devices, whose hosts answer with the same text. A device's first host dies after `first` or `second` tokens, if set."""

    def __init__(self, first: int | None = None, second: int | None = None) -> None:
        self.mortals = [Mortal(first), Mortal(second)]
        self.launchers = [mortal.launcher for mortal in self.mortals]


async def test_a_dead_hosts_sequences_continue_at_once_where_the_model_is_awake(make_pair: Callable[..., Any]) -> None:
    twins = Twins()
    async with make_pair(*twins.launchers, engine={**FAST, "scale_down_after_s": 600.0}) as pair:
        await both_awake(pair)
        for mortal in twins.mortals:
            mortal.launcher.failures = [OSError("no more processes")] * 50  # no successor starts
        gate = asyncio.Event()
        clients = pair.engines

        def cut(submit: Submit) -> Any:
            return [*says(TEXT[:5], finish=None), gate, 30]

        answers = [client.answer for client in clients]
        for client in clients:
            client.answer = cut
        exchange = start(pair.site.app, CHAT, ask(stream=True))
        await eventually(lambda: any(client.open for client in clients))
        await exchange.until(TEXT[4].encode())
        (at,) = [i for i, client in enumerate(clients) if client.open]
        clients[1 - at].answer = answers[1 - at]
        pair.launchers[at].hosts[0].die("it was killed")
        answer = await exchange.done()
        assert answer.events[-1] == "[DONE]"
        texts = [event["choices"][0]["delta"].get("content") or "" for event in answer.events[:-1] if event["choices"]]
        assert "".join(texts) == TEXT
        assert clients[1 - at].submits[-1].num_delivered_tokens == 5
        assert not pair.site.app.site.why_not_ready(), "the site never was without a host"
        assert 'pilotlight_cut_sequences_total{model_name="tiny",outcome="continued"} 1.0' in await pair.metrics()
        assert "pilotlight_engine_hosts_up 1.0" in await pair.metrics()


async def test_a_model_whose_host_died_wakes_on_the_sibling_where_no_successor_comes(
    make_pair: Callable[..., Any],
) -> None:
    twins = Twins(3, None)
    async with make_pair(*twins.launchers, engine={"scale_up_wait_s": 0.0}) as pair:
        assert pair.loaded == [["tiny"], []]
        pair.launchers[0].failures = [OSError("no more processes")] * 50
        answer = await call(pair.site.app, CHAT, ask())
        assert answer.json["choices"][0]["message"]["content"] == TEXT
        assert pair.engines[1].loaded == ["tiny"]
        assert 'pilotlight_wake_ms_count{clock="crash",model_name="tiny"} 1.0' in await pair.metrics()
        assert [replica.holds_memory for replica in pair.replicas()] == [False, True]


async def test_a_lost_spare_copy_is_not_missed(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    dead = even.launchers[0]
    dead.hosts[0].die("it was killed")
    await eventually(lambda: even.site.app.site.fleet.num_up == 2 and len(dead.hosts) == 2)
    assert (await call(even.site.app, CHAT, ask())).status == 200
    assert even.loaded == [[], ["tiny"]], "its load is low again"
    assert [replica.holds_memory for replica in even.replicas()] == [False, True]


async def test_a_device_whose_hosts_do_not_live_is_done_without(make_site: SiteMaker) -> None:
    """The model, which has no requests yet, starts to wake on the broken device, and then wakes on the other one."""
    broken, sound = FakeLauncher(), FakeLauncher()
    broken.failures = [OSError("no more processes")] * 100
    async with make_site(launcher=broken, timings=QUICK, further=[sound], engine=TWO, wait=False) as site:
        await eventually(lambda: sound.hosts and sound.client.loaded == ["tiny"])
        await eventually(lambda: not site.app.site.why_not_ready())
        sound.client.script = says("Hi")
        assert (await call(site.app, CHAT, ask())).status == 200


async def test_requests_that_wait_for_a_broken_device_are_answered_by_the_other(
    make_site: SiteMaker, entries: list[dict[str, Any]]
) -> None:
    broken, sound = FakeLauncher(), FakeLauncher()
    broken.failures = [OSError("no more processes")] * 100
    async with make_site(
        launcher=broken, timings=QUICK, further=[sound], engine=TWO, models=entries, wait=False
    ) as site:
        assert [(await call(site.app, CHAT, ask(name))).status for name in "abcd"] == [200] * 4


async def test_random_deaths_under_load_cost_no_answer(make_pair: Callable[..., Any]) -> None:
    chance = random.Random(7)
    twins = Twins()
    async with make_pair(*twins.launchers, engine={**FAST, "scale_down_after_s": 600.0}) as pair:
        await both_awake(pair)

        async def one(after_s: float) -> Exchange:
            await asyncio.sleep(after_s)
            return await call(pair.site.app, CHAT, ask(stream=True, max_tokens=16))  # 40 at once are still admitted

        asked = [asyncio.create_task(one(chance.uniform(0, 0.6))) for _ in range(40)]
        for _ in range(4):
            await asyncio.sleep(0.15)
            launcher = chance.choice(pair.launchers)
            launcher.hosts[-1].die("it was killed")
        for exchange in await asyncio.gather(*asked):
            assert exchange.status == 200, exchange.body
            texts = [event["choices"][0]["delta"].get("content") or "" for event in exchange.events[:-1]]
            assert "".join(texts) == TEXT

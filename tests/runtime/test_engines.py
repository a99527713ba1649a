"""The life of an engine host and the residency of models: start, supervision, restart, load (I5)."""

import asyncio
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.client import EngineError
from pilotlight.runtime.hosts.device_host import HOPELESS_AFTER
from pilotlight.runtime.hosts.supervisor import Supervisor
from pilotlight.runtime.models.wake_history import RETRY_FAILED_S
from pilotlight.sites.site import EngineConfig
from tests.asgi import call, eventually, start
from tests.fakes import FakeEngineClient, FakeHost, FakeLauncher, says
from tests.runtime.conftest import Site, SiteMaker
from tests.simulation.virtual_time import Process, VirtualLoop, virtual_time

CHAT = "/ai/v1/chat/completions"
HELLO = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


async def status(site: Site) -> Any:
    return (await call(site.app, "/status")).json


async def test_a_site_is_ready_once_its_models_are_on_the_device(make_site: SiteMaker) -> None:
    gate = asyncio.Event()
    launcher = FakeLauncher(lambda client: setattr(client, "load_gate", gate))
    async with make_site(launcher=launcher, wait=False) as site:
        await eventually(lambda: "loaded" in str(site.app.site.why_not_ready()))
        ready = await call(site.app, "/readyz")
        assert ready.status == 503
        assert ready.json["reasons"] == ["model 'tiny': 1 of 2 MB loaded"]
        (model,) = (await status(site))["models"]
        assert (model["residency"], model["loaded"]) == ("loading", 0.5)
        assert (await call(site.app, "/livez")).status == 200
        waiting = start(site.app, CHAT, HELLO)
        gate.set()
        assert (await waiting.done()).status == 200
        assert (await call(site.app, "/readyz")).status == 200


async def test_the_status_is_what_a_router_reads(site: Site) -> None:
    from pilotlight.wire.hop.status import decode_status

    first = decode_status((await call(site.app, "/status")).body)
    second = decode_status((await call(site.app, "/status")).body)
    assert (first.site, first.ready, first.draining, first.inflight) == ("ams1", True, False, 0)
    assert second.sequence > first.sequence
    (model,) = first.models
    assert model.name == "tiny"
    assert model.aliases == ("@test/tiny",)
    assert model.residency == "device"
    assert model.context_length == 512
    assert (model.kv_blocks_free, model.kv_blocks_total) == (60, 64)
    assert model.wake_ms > 0
    assert [process.role for process in first.processes] == ["site", "engine"]


async def test_a_host_that_dies_is_replaced_with_its_models(site: Site) -> None:
    first = site.launcher.hosts[0]
    first.die()
    await eventually(lambda: len(site.launcher.hosts) == 2 and not site.app.site.why_not_ready())
    assert first.is_stopped
    assert site.engine.loaded == ["tiny"]
    assert (await call(site.app, CHAT, HELLO)).status == 200


@pytest.mark.long
async def test_readiness_is_lost_while_the_host_is_down(site: Site) -> None:
    site.launcher.failures = [OSError("no more processes")] * 3
    site.launcher.hosts[0].die()
    await eventually(lambda: "no more processes" in str(site.app.site.why_not_ready()))
    ready = await call(site.app, "/readyz")
    assert ready.status == 503
    assert (await status(site))["ready"] is False
    await eventually(lambda: not site.app.site.why_not_ready(), 10)
    assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_no_surprise_leaves_the_site_without_a_supervisor(site: Site) -> None:
    site.launcher.failures = [RuntimeError("nobody thought of this")]
    site.launcher.hosts[0].die()
    await eventually(lambda: len(site.launcher.hosts) == 2 and not site.app.site.why_not_ready())
    assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_requests_are_sent_elsewhere_when_no_host_lives_and_the_site_recovers(make_site: SiteMaker) -> None:
    launcher = FakeLauncher()
    launcher.failures = [OSError("no more processes")] * 3
    async with make_site(launcher=launcher, wait=False) as site:
        waiting = await call(site.app, CHAT, HELLO)
        assert (waiting.status, waiting.json["error"]["code"]) == (503, "overloaded")
        assert "does not start" in waiting.json["error"]["message"]
        assert int(waiting.headers["retry-after"]) == round(RETRY_FAILED_S)
        await eventually(lambda: not site.app.site.why_not_ready(), 10)
        assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_a_waiter_for_a_host_after_one_that_died_learns_how_that_died() -> None:
    launcher = FakeLauncher()
    async with Supervisor(launcher, EngineConfig(standby=False)) as device:
        for number in range(HOPELESS_AFTER):
            await eventually(lambda number=number: len(launcher.hosts) == number + 1)
            launcher.hosts[-1].die("the engine host (pid 7) was ended by SIGBUS")
        await eventually(lambda: len(launcher.hosts) == HOPELESS_AFTER + 1)
        with pytest.raises(EngineError, match=r"does not start \(the engine host \(pid 7\) was ended by SIGBUS\)"):
            await device.next_client(after=device.client)


@pytest.mark.long
async def test_after_two_crashes_before_an_answer_a_host_believes_no_generated_file() -> None:
    launcher = FakeLauncher()
    async with Supervisor(launcher, EngineConfig(standby=False)) as device:
        for has_crashed in (True, False, True, True, True):
            number = len(launcher.launched_afresh)
            await eventually(lambda number=number: len(launcher.hosts) == max(1, number))
            launcher.hosts[-1].has_crashed = has_crashed
            launcher.hosts[-1].die()
            await eventually(lambda number=number: len(launcher.launched_afresh) == max(1, number) + 1, 10)
    assert device.restarts.num_restarts == 5
    assert launcher.launched_afresh == [False, False, False, False, True, True]


async def test_after_two_crashes_no_host_is_taken_that_waited_and_believes_those_files() -> None:
    launcher, waited = FakeLauncher(), [FakeHost(FakeEngineClient()) for _ in range(2)]
    supervisor = Supervisor(launcher, EngineConfig(standby=False))
    async with supervisor as device:
        await eventually(lambda: len(launcher.hosts) == 1)
        for host, standby in zip((launcher.hosts[0], waited[0]), waited, strict=True):
            await eventually(lambda host=host: device.client is host.client)
            supervisor.standby.running = standby
            host.has_crashed = True
            host.die()
        await eventually(lambda: launcher.launched_afresh == [False, True], 10)
        assert supervisor.standby.running is waited[1], "it was not taken"


def test_a_host_is_not_killed_because_its_site_was_stopped() -> None:
    loop, site, launcher = VirtualLoop(), Process("site", "127.0.0.1"), FakeLauncher()

    async def supervised() -> float:
        async with Supervisor(launcher, EngineConfig(standby=False, step_deadline_s=2.0)) as device:
            await eventually(lambda: device.ready is not None)
            with device.progress.expected():
                began = loop.now
                loop.call_later(1.0, loop.suspend, site, context=Context())
                loop.call_later(60.0, loop.resume, site, context=Context())
                await eventually(lambda: launcher.hosts[0].is_stopped, 100)
                return loop.now - began

    with virtual_time(loop, 0):
        assert loop.run_until_complete(loop.start(site, supervised())) == pytest.approx(62.0, abs=0.5)


@pytest.mark.long
async def test_a_host_with_work_and_no_step_is_killed(make_site: SiteMaker) -> None:
    async with make_site(engine={"step_deadline_s": 0.2}) as site:
        site.launcher.prepare = lambda client: setattr(client, "script", [30])
        site.engine.script = [*says("Hel", finish=None), 30]
        exchange = start(site.app, CHAT, {**HELLO, "stream": True})
        await eventually(lambda: "took no step for 0." in str(site.app.site.why_not_ready()))
        exchange.disconnect()
        await eventually(lambda: site.launcher.hosts[0].is_stopped)
        site.launcher.prepare = lambda client: None
        await site.is_idle()
        await eventually(lambda: not site.app.site.why_not_ready())
        assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_a_prompt_whose_step_takes_longer_than_the_deadline_is_answered(make_site: SiteMaker) -> None:
    """Each host of a slow core is killed before the step ends, until the deadline, which doubles each time, is long enough."""
    async with make_site(engine={"step_deadline_s": 0.2}) as site:
        script = [0.6, *says("Hello")]
        site.launcher.prepare = lambda client: setattr(client, "script", list(script))
        site.engine.script = list(script)
        answer = await call(site.app, CHAT, HELLO)
        assert answer.status == 200
        assert len(site.launcher.hosts) == 3, "0.2 and 0.4 s were too little"


async def test_a_host_that_is_never_ready_is_replaced(make_site: SiteMaker) -> None:
    gates = [asyncio.Event()]  # the first host never finishes its preparation

    def prepare(client: FakeEngineClient) -> None:
        client.hello_gate = client.load_gate = gates.pop() if gates else None

    async with make_site(launcher=FakeLauncher(prepare), engine={"start_timeout_s": 0.2}) as site:
        assert len(site.launcher.hosts) == 2
        assert (await call(site.app, CHAT, HELLO)).status == 200


@pytest.mark.long
async def test_a_lost_connection_counts_as_a_dead_host(site: Site) -> None:
    site.engine.fail("the socket was closed")  # the process itself lives
    assert (await call(site.app, CHAT, HELLO)).status == 200, "it waits for the next host"
    await eventually(lambda: len(site.launcher.hosts) == 2 and not site.app.site.why_not_ready())
    assert (await call(site.app, CHAT, HELLO)).status == 200


async def test_a_model_that_cannot_be_loaded_says_why(make_site: SiteMaker) -> None:
    error = EngineError("model_load_failed", "model.safetensors is truncated")
    launcher = FakeLauncher(lambda client: setattr(client, "load_error", error))
    async with make_site(launcher=launcher, wait=False) as site:
        await eventually(lambda: site.app.site.models.registry.statuses()[0].residency == "failed")
        answer = await call(site.app, CHAT, HELLO)
        assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
        assert "model.safetensors is truncated" in answer.json["error"]["message"]
        assert "truncated" in (await call(site.app, "/readyz")).json["reasons"][0]


async def test_a_load_that_kills_its_host_is_given_up(make_site: SiteMaker) -> None:
    launcher = FakeLauncher()

    def prepare(client: FakeEngineClient) -> None:
        client.load_gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.03, lambda: launcher.hosts[-1].die("it ran out of memory"))

    launcher.prepare = prepare
    async with make_site(launcher=launcher, wait=False) as site:
        await eventually(lambda: site.app.site.models.registry.statuses()[0].residency == "failed", 10)
        answer = await call(site.app, CHAT, HELLO)
        assert "died 3 times" in answer.json["error"]["message"]


@pytest.mark.long
async def test_a_load_is_not_given_up_because_its_hosts_are_killed_from_outside(make_site: SiteMaker) -> None:
    launcher = FakeLauncher()

    def prepare(client: FakeEngineClient) -> None:
        if len(launcher.hosts) < 4:
            client.load_gate = asyncio.Event()
            asyncio.get_running_loop().call_later(0.03, lambda: launcher.hosts[-1].kill())

    launcher.prepare = prepare
    async with make_site(launcher=launcher, wait=False) as site:
        assert (await call(site.app, CHAT, HELLO)).status == 200
        assert len(launcher.hosts) == 5


@pytest.mark.process
async def test_a_sleeping_model_is_loaded_once_by_its_first_requests(
    make_site: SiteMaker, model_directory: Path
) -> None:
    models = [{"name": "tiny", "source": str(model_directory), "residency": "disk"}]
    async with make_site(models=models) as site:
        assert (await status(site))["models"][0]["residency"] == "disk"
        await eventually(lambda: site.launcher.hosts)
        site.engine.load_gate = asyncio.Event()
        exchanges = [start(site.app, CHAT, HELLO) for _ in range(5)]
        await eventually(lambda: site.admission.inflight == 5)
        assert (await status(site))["models"][0]["residency"] == "loading"
        site.engine.load_gate.set()
        assert [(await exchange.done()).status for exchange in exchanges] == [200] * 5
        assert site.engine.loaded == ["tiny"]
        assert (await status(site))["models"][0]["residency"] == "device"


async def test_missing_files_are_a_sentence(make_site: SiteMaker, model_directory: Path) -> None:
    (model_directory / "tokenizer.json").unlink()
    async with make_site(wait=False) as site:
        answer = await call(site.app, CHAT, HELLO)
        assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
        assert "tokenizer.json is missing" in answer.json["error"]["message"]


async def test_a_tokenizer_of_another_model_is_refused_with_both_sizes(make_site: SiteMaker) -> None:
    launcher = FakeLauncher(lambda client: setattr(client, "vocab_size", 100))
    async with make_site(launcher=launcher, wait=False) as site:
        answer = await call(site.app, CHAT, HELLO)
        assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
        assert "256 tokens and its weights embed 100" in answer.json["error"]["message"]


async def test_metrics_name_what_people_chart(site: Site) -> None:
    site.engine.script = says("Hello", cached=3)
    await call(site.app, CHAT, HELLO)
    await call(site.app, CHAT, {**HELLO, "model": "nope"})
    text = (await call(site.app, "/metrics")).body.decode()
    for line in (
        'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0625',
        'vllm:time_to_first_token_seconds_count{model_name="tiny"} 1.0',
        'vllm:e2e_request_latency_seconds_count{model_name="tiny"} 1.0',
        'vllm:generation_tokens_total{model_name="tiny"} 6.0',
        'pilotlight_cached_prompt_tokens_total{model_name="tiny"} 3.0',
        'pilotlight_requests_total{model_name="tiny",outcome="stop"} 1.0',
        'pilotlight_http_responses_total{endpoint="chat/completions",status="404"} 1.0',
        "pilotlight_inflight_requests 0.0",
        "pilotlight_ready 1.0",
    ):
        assert line in text, line


async def test_outcomes_are_counted_whatever_they_are(make_site: SiteMaker) -> None:
    async with make_site(limits={"request_timeout_s": 0.2}) as site:
        site.engine.script = [30]
        await call(site.app, CHAT, HELLO)
        leaver = start(site.app, CHAT, HELLO)
        await eventually(lambda: site.engine.open)
        leaver.disconnect()
        await leaver.done()
        site.engine.script = [EngineError("overloaded", "the waiting queue is full")]
        await call(site.app, CHAT, HELLO)
        text = (await call(site.app, "/metrics")).body.decode()
        for outcome in ("request_timeout", "client_left", "overloaded"):
            assert f'outcome="{outcome}"}} 1.0' in text


async def test_requests_are_admitted_by_the_cache_that_the_model_could_have_now(site: Site) -> None:
    from pilotlight.engine.api.protocol import ModelLoad
    from pilotlight.runtime.generation.admission import QUEUED_CACHES

    many = {**HELLO, "max_tokens": 200}
    site.engine.script = [*says("Hel", finish=None), 30]
    first = start(site.app, CHAT, {**many, "stream": True})
    await first.until(b"Hel")
    second = start(site.app, CHAT, {**many, "stream": True})
    await second.until(b"Hel")
    site.engine.loads["tiny"] = ModelLoad(total_blocks=1)  # the host's other models hold the rest
    refused = await call(site.app, CHAT, many)
    assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
    assert f"{QUEUED_CACHES} times its KV cache" in refused.json["error"]["message"]
    for exchange in (first, second):
        exchange.disconnect()
        await exchange.done()

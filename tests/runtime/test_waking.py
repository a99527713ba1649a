"""Models that sleep and wake on a device too small for all of them: each request is served, and no model in use sleeps."""

import asyncio
import random
import struct
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.edge_router.backends.discovery import Discovery
from pilotlight.edge_router.routing.views import RouteRequest, eligible
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import LoadProgress, ModelSpec
from pilotlight.runtime.hosts.tier_directory import TierDirectory
from pilotlight.runtime.models.model_state import Replica
from pilotlight.runtime.models.wake_history import RETRY_FAILED_S
from pilotlight.runtime.timings import SiteTimings
from pilotlight.wire.hop.headers import Hop, sign_hop
from pilotlight.wire.hop.status import SiteStatus, decode_status
from tests.asgi import call, eventually, start
from tests.audit_events import observed_calls
from tests.edge_router.builders import Clock, network
from tests.fakes import FakeEngineClient, FakeLauncher, says, write_model_directory
from tests.runtime.conftest import Site, SiteMaker, WallClock

CHAT = "/ai/v1/chat/completions"
QUICK = SiteTimings(foresight_s=0.02, yield_after_s=0.05)
ROOM_FOR_TWO = 2000 / 2**30  # in GiB; the weights of a fake model have 1000 bytes


def ask(model: str, **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    """Write the table entries of three models of 1000 bytes that sleep and wake as needed."""
    names = ("a", "b", "c")
    for name in names:
        header = b'{"w": {"dtype": "F32", "shape": [250], "data_offsets": [0, 1000]}}'
        raw = struct.pack("<Q", len(header)) + header
        (write_model_directory(tmp_path / name) / "model.safetensors").write_bytes(raw + bytes(1000))
    return [{"name": name, "source": str(tmp_path / name), "residency": "auto"} for name in names]


@pytest.fixture
async def small(make_site: SiteMaker, entries: list[dict[str, Any]]) -> AsyncIterator[Site]:
    async with make_site(models=entries, timings=QUICK, engine={"weights_gib": ROOM_FOR_TWO}) as site:
        yield site
        await site.is_idle()


def at(site: Site, now_s: float) -> WallClock:
    """Set the clock of the demand estimates, which stands still from now on."""
    site.clock.now_s = now_s
    return site.clock


def own_name(tmp_path: Path) -> str:
    """Return a name for a site that no other process of this machine uses: the directory of weights in shared memory has it."""
    return f"w{abs(hash(str(tmp_path))) % 10**8}"


def replicas(site: Site) -> list[Replica]:
    return [replica for state in site.app.site.models.states.values() for replica in state.replicas]


async def residencies(site: Site) -> dict[str, str]:
    return {model["name"]: model["residency"] for model in (await call(site.app, "/status")).json["models"]}


async def test_the_least_expected_sleeps_when_a_third_wakes(small: Site) -> None:
    now = at(small, 1e6)
    for model, after_s in (("b", 0), ("a", 20_000), ("a", 1), ("a", 1), ("c", 1)):
        now.now_s += after_s
        for replica in replicas(small):
            replica.awake_since = 0.0  # the minimum stay of all is over
        assert (await call(small.app, CHAT, ask(model))).status == 200
    assert await residencies(small) == {"a": "device", "b": "disk", "c": "device"}
    assert sorted(small.engine.loaded) == ["a", "c"]
    (b,) = [model for model in (await call(small.app, "/status")).json["models"] if model["name"] == "b"]
    assert (b["wakes"], b["evictions"]) == (1, 1)
    text = (await call(small.app, "/metrics")).body.decode()
    for line in (
        'pilotlight_evictions_total{model_name="b",to="disk"} 1.0',
        'pilotlight_model_residency{model_name="c",residency="device"} 1.0',
        'pilotlight_model_residency{model_name="b",residency="device"} 0.0',
        'pilotlight_wake_ms_count{clock="swap",model_name="c"} 1.0',
        'pilotlight_wake_ms_count{clock="disk",model_name="a"} 1.0',
    ):
        assert line in text, line


async def test_a_model_with_open_requests_is_waited_for(small: Site) -> None:
    small.engine.script = [*says("Hel", finish=None), gate := asyncio.Event(), *says("lo")]
    open_ones = [start(small.app, CHAT, ask(model, stream=True)) for model in ("a", "b")]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    small.engine.script = says("Hi")
    third = start(small.app, CHAT, ask("c"))
    await eventually(lambda: small.app.site.models.states["c"].detail == "waiting for room on the device")
    await eventually(lambda: any(small.app.site.models.states[model].is_yielding for model in ("a", "b")))
    assert sorted(small.engine.loaded) == ["a", "b"], "no model was put to sleep"
    gate.set()
    assert (await third.done()).status == 200
    for exchange in open_ones:
        assert (await exchange.done()).events[-1] == "[DONE]"


async def test_a_model_that_is_always_in_use_has_to_take_turns(small: Site) -> None:
    """Requests for a and b overlap without end. After c has waited for a while, one of them takes no new requests until c was served."""
    small.engine.answer = lambda submit: [*says("H", finish=None), 0.03, *says("i")]
    stop = asyncio.Event()
    statuses: list[int] = []

    async def keep_busy(model: str) -> None:
        while not stop.is_set():
            statuses.append((await call(small.app, CHAT, ask(model))).status)

    crowd = [asyncio.create_task(keep_busy(model)) for model in ("a", "b") for _ in range(3)]
    await eventually(lambda: sorted(small.engine.loaded) == ["a", "b"])
    answer = await call(small.app, CHAT, ask("c"))
    assert answer.status == 200
    stop.set()
    await asyncio.wait_for(asyncio.gather(*crowd), 60)
    assert set(statuses) == {200}


async def test_a_busy_model_yields_after_a_while_and_takes_requests_again_after_the_other_ones_turn(
    small: Site,
) -> None:
    gates = {model: asyncio.Event() for model in "ab"}
    small.engine.answer = lambda submit: [*says("Hel", finish=None), gates[submit.model], *says("lo")]
    open_ones = {model: start(small.app, CHAT, ask(model, stream=True)) for model in "ab"}
    for exchange in open_ones.values():
        await exchange.until(b"Hel")
    small.engine.answer = lambda submit: says("Hi")
    third = start(small.app, CHAT, ask("c"))
    states = small.app.site.models.states
    await eventually(lambda: any(state.is_yielding for state in states.values()))
    (yielding,) = [model for model in "ab" if states[model].is_yielding]
    held_back = start(small.app, CHAT, ask(yielding))
    await eventually(lambda: states[yielding].demand.queued == 1)
    gates[yielding].set()
    assert (await third.done()).status == 200, "the other one's stream is still open"
    assert (await held_back.done()).status == 200
    assert not any(replica.is_yielding for replica in replicas(small))
    (other,) = {"a", "b"} - {yielding}
    gates[other].set()
    assert (await open_ones[other].done()).events[-1] == "[DONE]"


async def test_models_that_yield_take_requests_again_when_the_one_that_waited_cannot_be_had(small: Site) -> None:
    gates = {model: asyncio.Event() for model in "ab"}
    small.engine.answer = lambda submit: [*says("Hel", finish=None), gates[submit.model], *says("lo")]
    open_ones = [start(small.app, CHAT, ask(model, stream=True)) for model in "ab"]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    models = small.app.site.models
    models.hint("c")
    await eventually(lambda: any(replica.is_yielding for replica in replicas(small)))
    waiting = models.states["c"].replicas[0].task
    assert waiting is not None
    waiting.cancel()
    await asyncio.wait({waiting})
    assert not any(replica.is_yielding for replica in replicas(small))
    for gate in gates.values():
        gate.set()
    for exchange in open_ones:
        await exchange.done()


async def test_a_model_that_is_falling_asleep_is_not_put_to_sleep_again_and_its_room_is_heard_of(small: Site) -> None:
    for model in "ab":
        assert (await call(small.app, CHAT, ask(model))).status == 200
    small.engine.script = [*says("Hel", finish=None), open_end := asyncio.Event(), *says("lo")]
    open_one = start(small.app, CHAT, ask("b", stream=True))
    await open_one.until(b"Hel")
    small.engine.script = says("Hi")
    gate, unload_model = asyncio.Event(), small.engine.unload_model

    async def slowly(name: str) -> None:
        await gate.wait()
        await unload_model(name)

    small.engine.unload_model = slowly
    models = small.app.site.models
    falling_asleep = asyncio.create_task(models.put_to_sleep("a"))
    await eventually(lambda: models.states["a"].replicas[0].falling_asleep is not None)
    third = start(small.app, CHAT, ask("c"))
    await eventually(lambda: any(replica.is_yielding for replica in replicas(small)) or third.task.done())
    gate.set()
    assert (await third.done()).status == 200, third.body
    await falling_asleep
    open_end.set()
    await open_one.done()


async def test_what_a_load_waits_for_is_said_by_readyz_and_status(make_site: SiteMaker) -> None:
    gate, why = asyncio.Event(), "the Ray cluster 10.0.0.5:6379 has no 1 GPU free on other machines"

    class Waiting(FakeEngineClient):
        async def load_model(self, spec: ModelSpec, on_progress: Any = None) -> Any:
            on_progress(LoadProgress(spec.name, 0, 0, why))
            await gate.wait()
            return await super().load_model(spec, on_progress)

    launcher = FakeLauncher()
    launcher.client_class = Waiting
    async with make_site(timings=QUICK, launcher=launcher, wait=False) as site:
        await eventually(lambda: site.app.site.why_not_ready() == [f"model 'tiny': {why}"])
        assert (await call(site.app, "/readyz")).status == 503
        (model,) = (await call(site.app, "/status")).json["models"]
        assert (model["detail"], model["residency"]) == (why, "loading")
        gate.set()
        await eventually(lambda: not site.app.site.why_not_ready())


async def test_a_waiter_for_room_learns_at_once_that_another_model_did_not_wake(small: Site) -> None:
    """The waiting request wakes neither at the end of another request nor at its own next check, which may be late."""
    gate, load_model = asyncio.Event(), small.engine.load_model

    async def damaged(spec: ModelSpec, on_progress: Any = None) -> Any:
        if spec.name == "c":
            return await load_model(spec, on_progress)
        await gate.wait()
        raise EngineError("model_load_failed", "it is truncated")

    small.engine.load_model = damaged
    models = small.app.site.models
    for model in "ab":
        models.hint(model)
    await eventually(lambda: sum(replica.holds_memory for replica in replicas(small)) == 2)
    third = start(small.app, CHAT, ask("c"))
    # the request for c only waits for notifications now
    await eventually(lambda: any(replica.is_yielding for replica in replicas(small)))
    await asyncio.sleep(0)
    gate.set()
    assert (await third.done()).status == 200


async def test_a_host_that_dies_while_the_text_side_is_still_read_is_followed_by_one_that_loads_the_weights(
    small: Site, tmp_path: Path
) -> None:
    reading, gate = threading.Event(), threading.Event()

    def slowly(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and str(arguments[0]) == str(tmp_path / "a" / "tokenizer.json"):
            reading.set()
            assert gate.wait(60)

    with observed_calls(slowly):
        exchange = start(small.app, CHAT, ask("a"))
        first = small.launcher.hosts[0]
        await eventually(lambda: first.client.loaded == ["a"] and reading.is_set())
        first.die()
        gate.set()
        assert (await exchange.done()).status == 200
    assert small.engine is not first.client
    assert small.engine.loaded == ["a"]


async def test_the_queue_before_a_waking_model_is_bounded(make_site: SiteMaker, entries: list[dict[str, Any]]) -> None:
    async with make_site(timings=QUICK, models=entries, limits={"max_waking": 2}) as site:
        await eventually(lambda: site.launcher.hosts)
        site.engine.load_gate = asyncio.Event()
        waiting = [start(site.app, CHAT, ask("a")) for _ in range(2)]
        await eventually(lambda: site.app.site.models.states["a"].demand.queued == 2)
        refused = await call(site.app, CHAT, ask("a"))
        assert (refused.status, refused.json["error"]["code"]) == (503, "overloaded")
        assert "2 requests wait for 'a' to wake" in refused.json["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        site.engine.load_gate.set()
        assert [(await exchange.done()).status for exchange in waiting] == [200, 200]
        assert site.engine.loaded == ["a"], "woken once"
        assert site.app.site.models.states["a"].demand.queued == 0


async def test_a_model_that_can_never_fit_is_refused_with_the_arithmetic(
    make_site: SiteMaker, entries: list[dict[str, Any]]
) -> None:
    entries[0]["residency"] = "device"
    async with make_site(timings=QUICK, models=entries, engine={"weights_gib": 1500 / 2**30}) as site:
        answer = await call(site.app, CHAT, ask("b"))
        assert (answer.status, answer.json["error"]["code"]) == (500, "model_load_failed")
        message = answer.json["error"]["message"]
        assert "b needs 9.31e-07 GiB of the device and a, which stays, 9.31e-07 GiB" in message
        assert "there are 1.4e-06 GiB for weights" in message
        assert (await call(site.app, CHAT, ask("a"))).status == 200


async def test_after_a_crash_those_in_use_wake_and_the_others_sleep(small: Site) -> None:
    for model in ("a", "b"):
        await call(small.app, CHAT, ask(model))
    small.engine.script = [*says("Hel", finish=None), 30]
    exchange = start(small.app, CHAT, ask("a", stream=True))
    await exchange.until(b"Hel")
    small.launcher.hosts[0].die()
    await exchange.until(b"Hello, world"[:1])
    answer = await exchange.done()
    assert answer.events[-1] == "[DONE]"
    assert small.engine.loaded == ["a"]
    assert await residencies(small) == {"a": "device", "b": "disk", "c": "disk"}
    assert (
        'pilotlight_wake_ms_count{clock="crash",model_name="a"} 1.0'
        in (await call(small.app, "/metrics")).body.decode()
    )


async def test_an_idle_model_sleeps_when_the_site_file_says_so(
    make_site: SiteMaker, entries: list[dict[str, Any]]
) -> None:
    entries[0]["sleep_after_s"] = 0.05
    async with make_site(timings=QUICK, models=entries) as site:
        await call(site.app, CHAT, ask("a"))
        state = site.app.site.models.states["a"]
        await eventually(lambda: site.engine.loaded == [] and state.loaded is None)
        assert (await residencies(site))["a"] == "disk"
        assert (await call(site.app, CHAT, ask("a"))).status == 200


async def test_a_hint_wakes_a_model_and_only_a_router_may_give_one(
    make_site: SiteMaker, entries: list[dict[str, Any]]
) -> None:
    async with make_site(timings=QUICK, models=entries, hop_secret="s3cret") as site:
        unsigned = await call(site.app, "/internal/wake", {"model": "a"})
        assert (unsigned.status, unsigned.json["error"]["code"]) == (403, "forbidden")

        def signed(body: bytes) -> dict[str, str]:
            signature = sign_hop("s3cret", time.time(), Hop("POST", "/internal/wake", "r1", site.config.name), body)
            return {"x_pilotlight_hop": signature, "x_request_id": "r1"}

        hinted = await call(site.app, "/internal/wake", {"model": "a"}, **signed(b'{"model": "a"}'))
        assert (hinted.status, hinted.json) == (202, {"model": "a", "residency": "loading"})
        await eventually(lambda: site.engine.loaded == ["a"])
        unknown = await call(site.app, "/internal/wake", {"model": "nope"}, **signed(b'{"model": "nope"}'))
        assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
        garbled = await call(site.app, "/internal/wake", body=b"[]", **signed(b"[]"))
        assert (garbled.status, garbled.json["error"]["code"]) == (400, "malformed_json")


async def test_a_model_that_failed_to_load_is_offered_again_after_a_while_and_a_hint_wakes_it(small: Site) -> None:
    models, state = small.app.site.models, small.app.site.models.states["a"]
    small.engine.load_error = EngineError("model_load_failed", "the disk was away")
    assert (await call(small.app, CHAT, ask("a"))).json["error"]["code"] == "model_load_failed"
    models.hint("a")
    assert state.is_asleep
    assert not may_serve(await published(small), "a")
    state.history.failed_at -= RETRY_FAILED_S
    later = await published(small)
    assert may_serve(later, "a")
    (a,) = [model for model in later.models if model.name == "a"]
    assert (a.residency, a.detail) == ("disk", "the disk was away")
    small.engine.load_error = None
    models.hint("a")
    await eventually(lambda: state.loaded is not None)
    assert (state.history.failures, (await residencies(small))["a"]) == (0, "device")


async def test_a_model_that_stays_on_the_device_is_loaded_again_without_being_asked_for(make_site: SiteMaker) -> None:
    launcher = FakeLauncher(lambda client: setattr(client, "load_error", EngineError("model_load_failed", "no room")))
    async with make_site(timings=QUICK, launcher=launcher, wait=False) as site:
        state = site.app.site.models.states["tiny"]
        await eventually(lambda: state.history.failure is not None)
        site.engine.load_error = None
        await asyncio.sleep(0.1)
        assert state.is_asleep
        state.history.failed_at -= RETRY_FAILED_S
        await eventually(lambda: not site.app.site.why_not_ready())


def may_serve(status: SiteStatus, model: str) -> bool:
    """Tell whether a router would send a request here although another site is available."""
    backends = Discovery(
        network({"ams1": "http://127.0.0.1:1", "iad1": "http://127.0.0.1:2"}), clock := Clock()
    ).backends
    backends["ams1"].answered(status, clock())
    views = [backend.view() for backend in backends.values()]
    return any(view.name == "ams1" for view in eligible(RouteRequest(model), views))


async def published(site: Site) -> SiteStatus:
    return decode_status((await call(site.app, "/status")).body)


async def test_a_model_with_a_rhythm_wakes_before_it_is_asked_for(small: Site) -> None:
    state = small.app.site.models.states["a"]
    now = at(small, 1e6)
    await call(small.app, CHAT, ask("a"))
    for beat in range(10):
        state.demand.arrivals.note(now.now_s + 300.0 * (beat + 1))
    now.now_s += 3000.0 + 100.0
    await small.app.site.models.put_to_sleep("a")
    await asyncio.sleep(0.1)
    assert state.is_asleep, "it is not expected for another three minutes"
    now.now_s += 199.95
    await eventually(lambda: state.loaded is not None)


@pytest.mark.parametrize(("limit", "a_sleeps"), [(2500, "disk"), (3500, "host")])
async def test_weights_files_follow_the_models(
    make_site: SiteMaker,
    entries: list[dict[str, Any]],
    tmp_path: Path,
    limit: int,
    a_sleeps: str,
) -> None:
    """An engine writes its file at the given path. Files of sleeping models are removed if another model needs the space."""
    name, memory_gib = own_name(tmp_path), limit / 2**30
    specs: list[ModelSpec] = []

    class Writing(FakeEngineClient):
        async def load_model(self, spec: ModelSpec, on_progress: Any = None) -> Any:
            specs.append(spec)
            if spec.weights_file is not None:
                with open(spec.weights_file, "wb") as file:  # noqa: ASYNC230
                    file.write(b"w" * 1000)
            return await super().load_model(spec, on_progress)

    entries.append({**entries[0], "name": "d", "residency": "disk"})
    launcher = FakeLauncher()
    launcher.client_class = Writing
    engine = {"weights_gib": ROOM_FOR_TWO, "weights_host_gib": memory_gib}
    async with make_site(name=name, models=entries, launcher=launcher, timings=QUICK, engine=engine) as site:
        now = at(site, 1e6)
        for model, after_s in (("a", 0), ("b", 20_000), ("b", 1), ("c", 1)):
            now.now_s += after_s
            for replica in replicas(site):
                replica.awake_since = 0.0
            assert (await call(site.app, CHAT, ask(model))).status == 200
        assert await residencies(site) == {"a": a_sleeps, "b": "device", "c": "device", "d": "disk"}
        assert all(spec.weights_file for spec in specs)
        assert (await call(site.app, CHAT, ask("d"))).status == 200
        assert specs[3].weights_file is None, "it sleeps on disk"
    assert not TierDirectory(name, kind="weights").directory.exists()


async def test_what_is_to_sleep_in_host_memory_is_put_there_at_start(
    make_site: SiteMaker, entries: list[dict[str, Any]], tmp_path: Path
) -> None:
    for entry in entries[:2]:
        entry["residency"] = "host"
    async with make_site(
        timings=QUICK, name=own_name(tmp_path), models=entries, engine={"weights_host_gib": 1e-5}
    ) as site:
        states = site.app.site.models.states
        await eventually(
            lambda: [states[name].history.evictions for name in "abc"] == [1, 1, 0] and not site.engine.loaded
        )
        assert (await call(site.app, CHAT, ask("a"))).status == 200


async def test_random_traffic_over_too_little_room_is_all_answered(small: Site) -> None:
    chance = random.Random(3)
    small.engine.answer = lambda submit: [*says("H", finish=None), chance.choice([0.0, 0.005]), *says("i")]
    seen: set[str] = set()

    async def one(model: str, after_s: float) -> int:
        await asyncio.sleep(after_s)
        answer = await call(small.app, CHAT, ask(model))
        # A model that falls asleep still holds memory, and its successor waits for it.
        held = [each for each in replicas(small) if each.holds_memory and each.falling_asleep is None]
        assert sum(small.app.site.models.states[each.model].num_bytes for each in held) <= 2000
        seen.add(model)
        return answer.status

    asked = [one(chance.choice("aaabbc"), chance.uniform(0, 0.5)) for _ in range(60)]
    assert set(await asyncio.wait_for(asyncio.gather(*asked), 60)) == {200}
    assert seen == {"a", "b", "c"}
    assert all(
        state.demand.users == state.demand.waiters == state.demand.queued == 0
        for state in small.app.site.models.states.values()
    )


async def test_a_wake_is_on_the_timeline(small: Site) -> None:
    await call(small.app, CHAT, ask("a"))
    spans = (await call(small.app, "/timeline")).json["spans"]
    names = [span["name"] for span in spans if span["what"] == "a"]
    assert names == ["residency", "host", "load"]
    assert all(span["began_s"] <= span["ended_s"] for span in spans)
    assert {"engine process", "engine import"} <= {span["name"] for span in spans}


async def test_a_wait_for_room_does_not_count_as_waking(small: Site) -> None:
    """Otherwise models on a crowded device would stay awake longer, which would make it more crowded."""
    small.engine.script = [*says("Hel", finish=None), gate := asyncio.Event(), *says("lo")]
    open_ones = [start(small.app, CHAT, ask(model, stream=True)) for model in ("a", "b")]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    small.engine.script = says("Hi")
    third = start(small.app, CHAT, ask("c"))
    await asyncio.sleep(0.3)
    gate.set()
    await third.done()
    c = small.app.site.models.states["c"]
    (waited,) = [span for span in small.app.site.timeline.spans if span.what == "c" and span.name == "residency"]
    assert c.history.last_ms / 1e3 < waited.ended_s - waited.began_s
    assert c.expected_wake_s == c.history.last_ms / 1e3
    for exchange in open_ones:
        await exchange.done()

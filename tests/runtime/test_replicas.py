"""Replicas of a model on two devices: one is added under load, and removed when the other suffices."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pilotlight.engine.api.client import EngineError
from tests.asgi import call, eventually, start
from tests.fakes import FakeEngineClient, FakeLauncher, says
from tests.runtime.two_devices import CHAT, FAST, Pair, ask, entries, make_pair, pair

__all__ = ["entries", "make_pair", "pair"]


async def test_a_hot_model_wakes_on_the_other_device_and_sleeps_again(pair: Pair) -> None:
    home = pair.home
    pair.make_hot(home)
    await eventually(lambda: all(pair.awake))
    assert (await pair.status())["copies"] == 2
    pair.cool()
    await eventually(lambda: sorted(map(len, pair.loaded)) == [0, 1])
    assert (await call(pair.site.app, CHAT, ask())).status == 200
    text = await pair.metrics()
    assert 'pilotlight_scalings_total{direction="up",model_name="tiny"} 1.0' in text
    assert 'pilotlight_scalings_total{direction="down",model_name="tiny"} 1.0' in text
    assert 'pilotlight_model_copies{model_name="tiny"} 1.0' in text
    assert sum(replica.holds_memory for replica in pair.replicas()) == 1


async def test_a_model_is_awake_on_no_more_devices_than_its_file_allows(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    entries[0]["max_devices"] = 1
    async with make_pair(models=entries[:2], engine=FAST) as pair:
        for name in ("a", "b"):  # a is checked first
            assert (await call(pair.site.app, CHAT, ask(name))).status == 200
            pair.make_hot(next(i for i, loaded in enumerate(pair.loaded) if name in loaded), name)
        await eventually(lambda: sum(replica.is_awake for replica in pair.replicas("b")) == 2)
        assert (await pair.status("a"))["copies"] == 1


async def test_a_copy_that_goes_takes_nothing_new_and_ends_what_it_has(pair: Pair) -> None:
    gate = asyncio.Event()
    pair.make_hot(pair.home)
    await eventually(lambda: all(pair.awake))
    for engine in pair.engines:
        engine.answer = lambda submit: [*says("Hel", finish=None), gate, *says("lo")]
    open_ones = [start(pair.site.app, CHAT, ask(stream=True)) for _ in range(2)]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    assert [len(engine.open) for engine in pair.engines] == [1, 1]
    pair.cool()
    await eventually(lambda: any(replica.is_retiring for replica in pair.replicas()))
    (going,) = [replica for replica in pair.replicas() if replica.is_retiring]
    staying = pair.engines[1 - going.host.index]
    for engine in pair.engines:
        engine.answer = lambda submit: says("Hi")
    before = len(staying.submits)
    assert (await call(pair.site.app, CHAT, ask())).status == 200
    assert len(staying.submits) == before + 1
    assert all(pair.loaded), "it has a stream open"
    gate.set()
    for exchange in open_ones:
        assert (await exchange.done()).events[-1] == "[DONE]"
    await eventually(lambda: not pair.loaded[going.host.index])


async def test_a_model_about_to_go_comes_back_without_waking(pair: Pair) -> None:
    gate = asyncio.Event()
    pair.make_hot(pair.home)
    await eventually(lambda: all(pair.awake))
    for engine in pair.engines:
        engine.answer = lambda submit: [*says("Hel", finish=None), gate, *says("lo")]
    open_ones = [start(pair.site.app, CHAT, ask(stream=True)) for _ in range(2)]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    pair.cool()
    await eventually(lambda: any(replica.is_retiring for replica in pair.replicas()))
    for index in (0, 1):
        pair.make_hot(index)
    await eventually(lambda: not any(replica.is_retiring for replica in pair.replicas()))
    assert (await pair.status())["wakes"] == 2, "no third"
    gate.set()
    for exchange in open_ones:
        await exchange.done()


def _write(file: Path) -> bool:
    is_there = file.exists()
    file.write_bytes(b"w" * 1000)
    return is_there


async def test_a_further_copy_comes_from_the_weights_in_host_memory(
    make_pair: Callable[..., Any], tmp_path: Path
) -> None:
    name = f"w{abs(hash(str(tmp_path))) % 10**8}"  # the directory in shared memory has it
    files: list[str | None] = []

    class Mapping(FakeEngineClient):
        async def load_model(self, spec: Any, on_progress: Any = None) -> Any:
            files.append(spec.weights_file)
            assert spec.weights_file is not None
            info = await super().load_model(spec, on_progress)
            return replace(info, mapped=_write(Path(spec.weights_file)))

    launchers = FakeLauncher(), FakeLauncher()
    for launcher in launchers:
        launcher.client_class = Mapping
    async with make_pair(*launchers, name=name, engine={**FAST, "weights_host_gib": 1e-5}) as pair:
        pair.make_hot(pair.home)
        await eventually(lambda: all(pair.awake))
        assert files[0] == files[1]
        text = await pair.metrics()
        assert 'pilotlight_wake_ms_count{clock="sibling",model_name="tiny"} 1.0' in text
        assert 'pilotlight_wake_phase_ms_count{clock="sibling",phase="load"} 1.0' in text


async def test_no_model_sleeps_for_a_further_copy_but_it_sleeps_for_any_other(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    entries[3]["priority"] = -5
    async with make_pair(
        models=entries, engine={**FAST, "weights_gib": 2500 / 2**30, "scale_down_after_s": 60.0}
    ) as pair:
        for name in ("a", "b", "c", "d"):
            assert (await call(pair.site.app, CHAT, ask(name))).status == 200
        home = next(i for i, loaded in enumerate(pair.loaded) if "a" in loaded)
        pair.make_hot(home, "a")
        await asyncio.sleep(0.15)
        assert (await pair.status("a"))["copies"] == 1, "both devices are full"
        (slot_d,) = [replica for replica in pair.replicas("d") if replica.is_awake]
        slot_c = next(replica for replica in pair.replicas("c") if replica.is_awake)
        away = next(replica for replica in (slot_d, slot_c) if replica.host.index != home)
        await pair.site.app.site.models.put_to_sleep(away.model)
        await eventually(lambda: sum(replica.is_awake for replica in pair.replicas("a")) == 2)
        for name in "abcd":
            for replica in pair.replicas(name):
                replica.awake_since = 0.0
        assert (await call(pair.site.app, CHAT, ask(away.model))).status == 200
        awake = {name: (await pair.status(name))["copies"] for name in "abcd"}
        assert awake == dict.fromkeys("abcd", 1), "only the further replica of a went"


async def test_a_further_copy_that_cannot_be_loaded_hurts_no_request(make_pair: Callable[..., Any]) -> None:
    def refuse(client: FakeEngineClient) -> None:
        client.load_error = EngineError("model_load_failed", "the device is too small")

    async with make_pair(FakeLauncher(), FakeLauncher(refuse), engine=FAST) as pair:
        pair.make_hot(0)
        await eventually(lambda: pair.state().history.failed_at > 0)
        pair.engines[0].answer = lambda submit: says("Hi")
        assert (await call(pair.site.app, CHAT, ask())).status == 200
        assert (await pair.status())["residency"] == "device"
        await asyncio.sleep(0.1)
        assert (await pair.metrics()).count("pilotlight_scalings_total{") == 1, "it is not tried over and over"
        assert 'pilotlight_scalings_total{direction="up",model_name="tiny"} 1.0' in await pair.metrics()


async def test_the_whole_model_sleeps_when_it_is_idle(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    entries[0]["sleep_after_s"] = 0.2
    async with make_pair(models=entries[:1], engine=FAST) as pair:
        assert (await call(pair.site.app, CHAT, ask("a"))).status == 200
        await eventually(
            lambda: pair.loaded == [[], []] and not any(replica.holds_memory for replica in pair.replicas("a"))
        )
        assert (await call(pair.site.app, CHAT, ask("a"))).status == 200

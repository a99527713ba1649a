"""A site with two devices: models are spread over them, sequences dispatched between copies, copies come when a model is hot and go when it is not,
and one host's death is another's work (I1, I3, I4, I6)."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from engine.client import EngineError
from engine.protocol import ModelLoad, SamplingParams, Submit
from runtime import app as app_module
from runtime.engines import autoscaler as autoscaler_module
from runtime.engines import models as models_module
from runtime.engines import room as room_module
from runtime.engines import scaling as scaling_module
from runtime.engines.copies import Copy
from runtime.engines.cores import divided
from runtime.engines.devices import check_devices
from runtime.engines.prefixes import CHUNK, PrefixMemory, chain_of
from runtime.engines.tier_place import TierPlace
from runtime.engines.weights_tier import WeightsTier
from sites.config import ConfigError
from tests.asgi import Exchange, call, eventually, start
from tests.fakes import FakeEngineClient, FakeLauncher, says, write_model_directory
from tests.runtime.conftest import Site, SiteMaker, site_config
from tests.runtime.test_continuation import TEXT, Mortal

CHAT = "/ai/v1/chat/completions"
TWO = {"devices": ["cpu", "cpu"]}
FAST = {**TWO, "scale_up_wait_s": 1.0, "scale_down_after_s": 0.05}
GATED: list[Any] = []


def ask(model: str = "tiny", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler_module, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(scaling_module, "HOT_FOR_S", 0.03)
    monkeypatch.setattr(models_module, "FORESIGHT_S", 0.02)
    monkeypatch.setattr(room_module, "YIELD_AFTER_S", 0.05)


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    """Four models of 1000 bytes."""
    names = ("a", "b", "c", "d")
    for name in names:
        header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
        raw = struct.pack("<Q", len(header)) + header
        (write_model_directory(tmp_path / name) / "model.safetensors").write_bytes(raw.ljust(1000, b"\0"))
    return [{"name": name, "source": str(tmp_path / name), "residency": "auto"} for name in names]


class Pair:
    """A site with two devices, and what happens to each engine."""

    def __init__(self, site: Site, *launchers: FakeLauncher) -> None:
        self.site = site
        self.launchers = launchers

    @property
    def engines(self) -> list[FakeEngineClient]:
        """The serving hosts' clients, in the order of the devices."""
        return [launcher.client for launcher in self.launchers]

    @property
    def loaded(self) -> list[list[str]]:
        """By device, what its engine has."""
        return [sorted(engine.loaded) for engine in self.engines]

    @property
    def awake(self) -> list[list[str]]:
        """By device, what its engine has and the site knows to be awake: that is a moment later."""
        return [
            sorted(name for name in engine.loaded if self.copies(name)[index].is_awake)
            for index, engine in enumerate(self.engines)
        ]

    def copies(self, model: str = "tiny") -> tuple[Copy, ...]:
        copies: tuple[Copy, ...] = self.site.app.state.models._slots[model].copies
        return copies

    @property
    def home(self) -> int:
        """The device of the model that is awake on one."""
        (index,) = [i for i, loaded in enumerate(self.loaded) if loaded]
        return index

    def make_hot(self, index: int, model: str = "tiny") -> None:
        self.engines[index].loads[model] = ModelLoad(
            running=4, waiting_tokens=5000, prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0, total_blocks=64
        )

    def cool(self, model: str = "tiny") -> None:
        for engine in self.engines:
            if model in engine.loaded:
                engine.loads[model] = ModelLoad(prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0, total_blocks=64)

    async def metrics(self) -> str:
        return (await call(self.site.app, "/metrics")).body.decode()

    async def status(self, model: str = "tiny") -> dict[str, Any]:
        models = (await call(self.site.app, "/status")).json["models"]
        found: dict[str, Any] = next(entry for entry in models if entry["name"] == model)
        return found


@pytest.fixture
def make_pair(make_site: SiteMaker) -> Callable[..., Any]:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def make(*launchers: FakeLauncher, **tables: Any) -> AsyncIterator[Pair]:
        first, second = launchers or (FakeLauncher(), FakeLauncher())
        tables["engine"] = {**TWO, **tables.get("engine", {})}
        async with make_site(launcher=first, further=[second], **tables) as site:
            await eventually(lambda: site.app.state.fleet.num_up == 2)
            yield Pair(site, first, second)
            await site.is_idle()
            for slot in site.app.state.models._slots.values():
                for copy in slot.copies:
                    assert (copy.work.sequences, copy.work.prefill_tokens, copy.work.decode_tokens) == (0, 0, 0)

    return make


@pytest.fixture
async def pair(make_pair: Callable[..., Any]) -> AsyncIterator[Pair]:
    async with make_pair(engine=FAST) as made:
        yield made


async def test_models_are_spread_over_the_devices(make_pair: Callable[..., Any], entries: list[dict[str, Any]]) -> None:
    async with make_pair(models=entries) as pair:
        for entry in entries:
            assert (await call(pair.site.app, CHAT, ask(entry["name"]))).status == 200
        assert [len(loaded) for loaded in pair.loaded] == [2, 2]
        processes = (await call(pair.site.app, "/status")).json["processes"]
        assert [(p["role"], p["device"]) for p in processes[1:]] == [("engine", "cpu")] * 2


async def test_every_device_has_a_budget_of_its_own(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    async with make_pair(models=entries, engine={"weights_gib": 1500 / 2**30}) as pair:
        for entry in entries * 2:
            for other in entries:
                for copy in pair.copies(other["name"]):
                    copy.awake_since = 0.0  # all have stayed for long enough
            assert (await call(pair.site.app, CHAT, ask(entry["name"]))).status == 200
            assert all(len(loaded) <= 1 for loaded in pair.loaded)
        assert [len(loaded) for loaded in pair.loaded] == [1, 1]


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
    assert sum(copy.holds_room for copy in pair.copies()) == 1


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
    await eventually(lambda: any(copy.is_retiring for copy in pair.copies()))
    (going,) = [copy for copy in pair.copies() if copy.is_retiring]
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


async def test_what_is_about_to_go_comes_back_without_waking(pair: Pair) -> None:
    gate = asyncio.Event()
    pair.make_hot(pair.home)
    await eventually(lambda: all(pair.awake))
    for engine in pair.engines:
        engine.answer = lambda submit: [*says("Hel", finish=None), gate, *says("lo")]
    open_ones = [start(pair.site.app, CHAT, ask(stream=True)) for _ in range(2)]
    for exchange in open_ones:
        await exchange.until(b"Hel")
    pair.cool()
    await eventually(lambda: any(copy.is_retiring for copy in pair.copies()))
    for index in (0, 1):
        pair.make_hot(index)
    await eventually(lambda: not any(copy.is_retiring for copy in pair.copies()))
    assert (await pair.status())["wakes"] == 2, "no third"
    gate.set()
    for exchange in open_ones:
        await exchange.done()


def _write(file: Path) -> bool:
    is_there = file.exists()
    file.write_bytes(b"w" * 1000)
    return is_there


async def test_a_further_copy_comes_from_the_weights_in_host_memory(
    make_pair: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = TierPlace("ams1", tmp_path, "weights")
    directory = place.claim()
    assert directory is not None
    monkeypatch.setattr(app_module, "open_tier", lambda site: WeightsTier(place, directory, 10_000))
    files: list[str | None] = []

    class Mapping(FakeEngineClient):
        async def load_model(self, spec: Any, on_progress: Any = None) -> Any:
            files.append(spec.weights_file)
            assert spec.weights_file is not None
            info = await super().load_model(spec, on_progress)
            return info._replace(mapped=_write(Path(spec.weights_file)))

    launchers = FakeLauncher(), FakeLauncher()
    for launcher in launchers:
        launcher.client_class = Mapping
    async with make_pair(*launchers, engine={**FAST, "weights_host_gib": 1.0}) as pair:
        pair.make_hot(pair.home)
        await eventually(lambda: all(pair.awake))
        assert files[0] == files[1]
        text = await pair.metrics()
        assert 'pilotlight_wake_ms_count{clock="sibling",model_name="tiny"} 1.0' in text
        assert 'pilotlight_wake_phase_ms_count{clock="sibling",phase="load"} 1.0' in text


async def test_nobody_sleeps_for_a_further_copy_but_it_sleeps_for_anybody(
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
        (slot_d,) = [copy for copy in pair.copies("d") if copy.is_awake]
        slot_c = next(copy for copy in pair.copies("c") if copy.is_awake)
        away = next(copy for copy in (slot_d, slot_c) if copy.host.index != home)
        await pair.site.app.state.models._rooms[away.host.index].put_to_sleep(away)
        await eventually(lambda: sum(copy.is_awake for copy in pair.copies("a")) == 2)
        for name in "abcd":
            for copy in pair.copies(name):
                copy.awake_since = 0.0
        assert (await call(pair.site.app, CHAT, ask(away.slot.config.name))).status == 200
        awake = {name: (await pair.status(name))["copies"] for name in "abcd"}
        assert awake == dict.fromkeys("abcd", 1), "the further copy of a went, nobody else"


async def both_awake(pair: Pair) -> None:
    pair.make_hot(pair.home)
    await eventually(lambda: all(pair.awake))
    for engine in pair.engines:
        engine.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0, total_blocks=64)


@pytest.fixture
async def even(make_pair: Callable[..., Any]) -> AsyncIterator[Pair]:
    """Two copies of one model, which both stay."""
    async with make_pair(engine={**FAST, "scale_down_after_s": 600.0}) as made:
        await both_awake(made)
        yield made


async def test_requests_go_where_least_is_open(even: Pair) -> None:
    gate = asyncio.Event()
    for engine in even.engines:
        engine.answer = lambda submit: [*says("H", finish=None), gate, *says("i")]
    exchanges: list[Exchange] = []
    for i in range(6):
        exchanges.append(start(even.site.app, CHAT, ask(stream=True, user=str(i))))
        await exchanges[-1].until(b"H")
    counts = [len(engine.open) for engine in even.engines]
    gate.set()
    assert counts == [3, 3]
    for exchange in exchanges:
        await exchange.done()


async def test_all_choices_of_a_request_are_where_its_prompt_is(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    assert len((await call(even.site.app, CHAT, ask(n=4))).json["choices"]) == 4
    assert sorted(len(engine.submits) for engine in even.engines) == [0, 4]


LONG = "the pilot light of a gas stove burns small and blue until somebody wants warm water " * 3


def turn(text: str, answer: str | None = None) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    return {"model": "tiny", "messages": messages}


async def test_a_conversation_stays_where_its_prefix_is_as_long_as_that_pays(even: Pair) -> None:
    gates: list[asyncio.Event] = []
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    assert (await call(even.site.app, CHAT, turn(LONG))).status == 200
    (first,) = [i for i, engine in enumerate(even.engines) if engine.submits]
    # something small is open there: computing the long prompt anew elsewhere would still take longer
    blocker = asyncio.Event()
    gates.append(blocker)
    even.engines[first].scripts = []
    even.engines[first].answer = None
    even.engines[first].script = [*says("H", finish=None), blocker, *says("i")]
    holder = start(even.site.app, CHAT, {**turn(LONG), "stream": True, "max_tokens": 2})
    await holder.until(b"H")
    assert even.engines[first].open, "the same prompt went to the same place"
    even.engines[first].answer = lambda submit: says("Hi")
    before = [len(engine.submits) for engine in even.engines]
    assert (await call(even.site.app, CHAT, turn(LONG, "Hi"))).status == 200
    after = [len(engine.submits) for engine in even.engines]
    assert after[first] == before[first] + 1, "it stays"
    even.copies()[first].work.prefill_tokens += 10_000  # ten seconds of others' prompts
    assert (await call(even.site.app, CHAT, turn(LONG, "Hi"))).status == 200
    even.copies()[first].work.prefill_tokens -= 10_000
    assert len(even.engines[1 - first].submits) == after[1 - first] + 1, "now it does not pay"
    for gate in gates:
        gate.set()
    await holder.done()


def test_another_tenants_prompt_says_nothing() -> None:
    prompt = tuple(range(3 * CHUNK + 5))
    memory = PrefixMemory()
    memory.remember(chain_of(b"one", prompt), 10_000)
    assert memory.held_tokens(chain_of(b"one", (*prompt, 7, 8))) == 3 * CHUNK
    assert memory.held_tokens(chain_of(b"another", prompt)) == 0
    assert memory.held_tokens(chain_of(b"one", (9, *prompt[1:]))) == 0, "a chain hangs on its beginning"


def test_prefixes_are_forgotten_from_their_tails_and_oldest_first() -> None:
    memory = PrefixMemory()
    old, new = chain_of(b"", range(4 * CHUNK)), chain_of(b"", range(9, 9 + 4 * CHUNK))
    memory.remember(old, 6 * CHUNK)
    memory.remember(new, 6 * CHUNK)
    assert (memory.held_tokens(old), memory.held_tokens(new)) == (2 * CHUNK, 4 * CHUNK)


class Twins:
    """Two hosts that say the same text; those of the given devices die once, after so many tokens of a sequence."""

    def __init__(self, first: int | None = None, second: int | None = None) -> None:
        self.mortals = [Mortal(first), Mortal(second)]
        self.launchers = [mortal.launcher for mortal in self.mortals]


async def test_a_dead_hosts_sequences_go_on_at_once_where_the_model_is_awake(make_pair: Callable[..., Any]) -> None:
    twins = Twins()
    async with make_pair(*twins.launchers, engine={**FAST, "scale_down_after_s": 600.0}) as pair:
        await both_awake(pair)
        for mortal in twins.mortals:
            mortal.launcher.failures = [OSError("no more processes")] * 50  # no successor comes
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
        assert not pair.site.app.state.health.why_not_ready(), "the site never was without a host"
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
        assert [copy.holds_room for copy in pair.copies()] == [False, True]


async def test_a_lost_spare_copy_is_not_missed(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    dead = even.launchers[0]
    dead.hosts[0].die("it was killed")
    await eventually(lambda: even.site.app.state.fleet.num_up == 2 and len(dead.hosts) == 2)
    assert (await call(even.site.app, CHAT, ask())).status == 200
    assert even.loaded == [[], ["tiny"]], "it is not hot any more"
    assert [copy.holds_room for copy in even.copies()] == [False, True]


async def test_a_further_copy_that_cannot_be_loaded_hurts_nobody(make_pair: Callable[..., Any]) -> None:
    def refuse(client: FakeEngineClient) -> None:
        client.load_error = EngineError("model_load_failed", "the device is too small")

    async with make_pair(FakeLauncher(), FakeLauncher(refuse), engine=FAST) as pair:
        pair.make_hot(0)
        await eventually(lambda: pair.copies()[0].slot.failed_at > 0)
        pair.engines[0].answer = lambda submit: says("Hi")
        assert (await call(pair.site.app, CHAT, ask())).status == 200
        assert (await pair.status())["residency"] == "device"
        await asyncio.sleep(0.1)
        assert (await pair.metrics()).count("pilotlight_scalings_total{") == 1, "it is not tried over and over"
        assert 'pilotlight_scalings_total{direction="up",model_name="tiny"} 1.0' in await pair.metrics()


async def test_a_device_whose_hosts_do_not_live_is_done_without(make_site: SiteMaker) -> None:
    """The model was to wake there, and nobody asks for it: it wakes on the other device."""
    broken, sound = FakeLauncher(), FakeLauncher()
    broken.failures = [OSError("no more processes")] * 100
    async with make_site(launcher=broken, further=[sound], engine=TWO, wait=False) as site:
        await eventually(lambda: sound.hosts and sound.client.loaded == ["tiny"])
        await eventually(lambda: not site.app.state.health.why_not_ready())
        sound.client.script = says("Hi")
        assert (await call(site.app, CHAT, ask())).status == 200


async def test_requests_that_wait_for_a_broken_device_are_answered_by_the_other(
    make_site: SiteMaker, entries: list[dict[str, Any]]
) -> None:
    broken, sound = FakeLauncher(), FakeLauncher()
    broken.failures = [OSError("no more processes")] * 100
    async with make_site(launcher=broken, further=[sound], engine=TWO, models=entries, wait=False) as site:
        assert [(await call(site.app, CHAT, ask(name))).status for name in "abcd"] == [200] * 4


async def test_the_whole_model_sleeps_when_it_is_idle(
    make_pair: Callable[..., Any], entries: list[dict[str, Any]]
) -> None:
    entries[0]["sleep_after_s"] = 0.2
    async with make_pair(models=entries[:1], engine=FAST) as pair:
        assert (await call(pair.site.app, CHAT, ask("a"))).status == 200
        await eventually(lambda: pair.loaded == [[], []] and not any(copy.holds_room for copy in pair.copies("a")))
        assert (await call(pair.site.app, CHAT, ask("a"))).status == 200


async def test_random_deaths_under_load_cost_no_answer(make_pair: Callable[..., Any]) -> None:
    import random

    chance = random.Random(7)
    twins = Twins()
    async with make_pair(*twins.launchers, engine={**FAST, "scale_down_after_s": 600.0}) as pair:
        await both_awake(pair)

        async def one(after_s: float) -> Exchange:
            await asyncio.sleep(after_s)
            return await call(pair.site.app, CHAT, ask(stream=True, max_tokens=16))  # 40 at once still fit

        asked = [asyncio.create_task(one(chance.uniform(0, 0.6))) for _ in range(40)]
        for _ in range(4):
            await asyncio.sleep(0.15)
            launcher = chance.choice(pair.launchers)
            launcher.hosts[-1].die("it was killed")
        for exchange in await asyncio.gather(*asked):
            assert exchange.status == 200, exchange.body
            texts = [event["choices"][0]["delta"].get("content") or "" for event in exchange.events[:-1]]
            assert "".join(texts) == TEXT


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ({"devices": ["cuda:0", "cuda:0"]}, "'cuda:0' is named twice"),
        ({"devices": ["cuda:0", "gpu"]}, "'gpu' does not say which device it is; say cpu or cuda:N"),
        ({"devices": ["cuda"]}, "'cuda' does not say which device it is"),
        ({"devices": ["cpu", "cuda:0"]}, "name CPUs or GPUs, not both"),
        ({"devices": ["cpu"], "device": "cpu"}, "device and devices are both given"),
        ({"devices": []}, "at least 1 item"),
        ({"device": "gpu"}, "'gpu' is no device; say auto, cpu, cuda or cuda:N"),
    ],
)
def test_devices_that_make_no_sense_are_refused(model_directory: Path, engine: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        site_config(model_directory, engine=engine)


def test_gpus_that_the_machine_does_not_have_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    with pytest.raises(ConfigError, match=r"'cuda:0' cannot be used: this machine shows no NVIDIA GPU"):
        check_devices(["cuda:0"], tmp_path)
    with pytest.raises(ConfigError, match=r"shows no NVIDIA GPU; correct engine\.device"):
        check_devices(["cuda"], tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    check_devices(["cuda:0", "cuda:1"], tmp_path)
    check_devices(["cuda"], tmp_path)
    with pytest.raises(ConfigError, match=r"'cuda:2' cannot be used: this machine shows 2, cuda:0 to cuda:1"):
        check_devices(["cuda:0", "cuda:2"], tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(ConfigError, match="this machine shows one, cuda:0"):
        check_devices(["cuda:0", "cuda:1"], tmp_path)
    check_devices(["cpu", "cpu"], tmp_path)
    check_devices(["auto"], tmp_path)


def test_cores_are_divided_between_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for node, cores in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert divided(2, tmp_path) == [{0, 1, 4, 5}, {2, 3, 6, 7}]
    assert divided(4, tmp_path) == [{0, 1}, {4, 5}, {2, 3}, {6, 7}]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert divided(2, tmp_path) == [None, None], "one core cannot be divided"


async def test_sampling_params_reach_the_copy_unchanged(even: Pair) -> None:
    for engine in even.engines:
        engine.answer = lambda submit: says("Hi")
    await call(even.site.app, CHAT, ask(seed=5, temperature=0.5))
    (submit,) = [submit for engine in even.engines for submit in engine.submits]
    assert isinstance(submit.sampling, SamplingParams)
    assert (submit.sampling.seed, submit.sampling.temperature) == (5, 0.5)

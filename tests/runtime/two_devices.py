"""Fixtures of a site with two devices and fake engines, to be imported by name."""

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import ModelLoad
from pilotlight.runtime.models.model_state import ModelState, Replica
from pilotlight.runtime.timings import SiteTimings
from tests.asgi import call, eventually
from tests.fakes import FakeEngineClient, FakeLauncher, write_model_directory
from tests.runtime.conftest import Site, SiteMaker

CHAT = "/ai/v1/chat/completions"
TWO = {"devices": ["cpu", "cpu"]}
QUICK = SiteTimings(scaling_s=0.01, hot_for_s=0.03, foresight_s=0.02, yield_after_s=0.05)
FAST = {**TWO, "scale_up_wait_s": 1.0, "scale_down_after_s": 0.05}


def ask(model: str = "tiny", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Hi"}], **more}


@pytest.fixture
def entries(tmp_path: Path) -> list[dict[str, Any]]:
    """Write the table entries of four models of 1000 bytes."""
    names = ("a", "b", "c", "d")
    for name in names:
        header = b'{"w": {"dtype": "F32", "shape": [250], "data_offsets": [0, 1000]}}'
        raw = struct.pack("<Q", len(header)) + header
        (write_model_directory(tmp_path / name) / "model.safetensors").write_bytes(raw + bytes(1000))
    return [{"name": name, "source": str(tmp_path / name), "residency": "auto"} for name in names]


class Pair:
    """A site with two devices, and controls of each engine."""

    def __init__(self, site: Site, *launchers: FakeLauncher) -> None:
        self.site = site
        self.launchers = launchers

    @property
    def engines(self) -> list[FakeEngineClient]:
        """Return the clients of the serving hosts, in the order of the devices."""
        return [launcher.client for launcher in self.launchers]

    @property
    def loaded(self) -> list[list[str]]:
        """Return the models that each device's engine has loaded."""
        return [sorted(engine.loaded) for engine in self.engines]

    @property
    def awake(self) -> list[list[str]]:
        """Return the models on each device that the site knows to be awake, which is a moment after they are loaded."""
        return [
            sorted(name for name in engine.loaded if self.replicas(name)[index].is_awake)
            for index, engine in enumerate(self.engines)
        ]

    def replicas(self, model: str = "tiny") -> tuple[Replica, ...]:
        return self.state(model).replicas

    def state(self, model: str = "tiny") -> ModelState:
        state: ModelState = self.site.app.site.models.states[model]
        return state

    @property
    def home(self) -> int:
        """Return the device on which the model is awake, if it is awake on one."""
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
    @asynccontextmanager
    async def make(*launchers: FakeLauncher, **tables: Any) -> AsyncIterator[Pair]:
        first, second = launchers or (FakeLauncher(), FakeLauncher())
        tables["engine"] = {**TWO, **tables.get("engine", {})}
        async with make_site(launcher=first, further=[second], timings=QUICK, **tables) as site:
            await eventually(lambda: site.app.site.fleet.num_up == 2)
            yield Pair(site, first, second)
            await site.is_idle()
            for state in site.app.site.models.states.values():
                for replica in state.replicas:
                    assert replica.work.sequences == 0
                    assert replica.work.prefill_tokens == 0
                    assert replica.work.decode_tokens == 0

    return make


@pytest.fixture
async def pair(make_pair: Callable[..., Any]) -> AsyncIterator[Pair]:
    async with make_pair(engine=FAST) as made:
        yield made


async def both_awake(pair: Pair) -> None:
    pair.make_hot(pair.home)
    await eventually(lambda: all(pair.awake))
    for engine in pair.engines:
        engine.loads["tiny"] = ModelLoad(prefill_tokens_per_s=1000.0, decode_tokens_per_s=20.0, total_blocks=64)


@pytest.fixture
async def even(make_pair: Callable[..., Any]) -> AsyncIterator[Pair]:
    """Make two replicas of one model, which both stay awake."""
    async with make_pair(engine={**FAST, "scale_down_after_s": 600.0}) as made:
        await both_awake(made)
        yield made

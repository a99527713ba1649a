"""A device on which every step fails: few requests fail, its host is replaced, and then requests succeed."""

import asyncio
from pathlib import Path

import pytest

from load_tests.in_process_client import InProcessEngineClient
from pilotlight.engine.api.client import EngineError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec, SamplingParams, Submit
from pilotlight.runtime.hosts.supervisor import Supervisor
from pilotlight.sites.site import EngineConfig
from tests.checkpoints import write_llama


class InProcessHost:
    pid = None
    url = None
    has_crashed = False

    def __init__(self) -> None:
        self.client = InProcessEngineClient(HostConfig(threads=1, kv_bytes=1 << 20))

    async def exited(self) -> str:
        while (death := self.client.death) is None:
            await asyncio.sleep(0.01)
        return death

    async def stop(self, grace_s: float) -> None:
        await self.client.close()


class Launcher:
    def __init__(self) -> None:
        self.hosts: list[InProcessHost] = []

    async def launch(self, *, standby: bool = False, afresh: bool = False) -> InProcessHost:
        self.hosts.append(InProcessHost())
        return self.hosts[-1]

    def close(self) -> None:
        pass


async def test_a_device_whose_every_step_fails_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pilotlight.engine.core.step import StepInput
    from pilotlight.engine.execution.runner import ModelRunner

    write_llama(tmp_path)
    launcher = Launcher()
    forward, is_broken = ModelRunner.forward, False

    def fail(self: ModelRunner, step: StepInput) -> object:
        if is_broken and len(launcher.hosts) == 1:
            raise RuntimeError("no launch of this process succeeds any more")
        return forward(self, step)

    monkeypatch.setattr(ModelRunner, "forward", fail)
    spec, failures = ModelSpec("tiny", str(tmp_path), "auto", 512), []
    async with Supervisor(launcher, EngineConfig(standby=False)) as host:
        first = await host.next_client()
        await host.load_model(first, spec, lambda progress: None)
        is_broken = True
        while host.client is first:
            try:
                async with host.serving_client().generate(Submit("a", "tiny", (5, 6, 7), SamplingParams(4))) as outputs:
                    assert [output async for output in outputs] == []
            except EngineError as error:
                failures.append(str(error))
            if first.death is not None:
                assert "no launch of this process" in (host.why_down or "")
                break
        assert len(failures) == 3
        second = await host.next_client(after=first)
        await host.load_model(second, spec, lambda progress: None)
        async with host.serving_client().generate(Submit("a", "tiny", (5, 6, 7), SamplingParams(4))) as outputs:
            assert len([output async for output in outputs]) == 4
        assert (host.restarts.num_restarts, host.state) == (1, "up")

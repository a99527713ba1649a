"""Hosts prepare in advance for models that they may have to load."""

import logging
import os
import threading
from pathlib import Path

import pytest

from load_tests.in_process_client import InProcessEngineClient
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.host import prewarming
from pilotlight.engine.host.prewarming import prewarm
from tests.checkpoints import write_llama

CONFIG = HostConfig(threads=1, kv_bytes=1 << 20)


@pytest.mark.cpu_only
async def test_a_host_makes_ready_at_low_priority_and_when_it_fails_loads_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path)
    priorities: list[int] = []

    def fail(spec: ModelSpec, host: HostConfig) -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        raise RuntimeError("no device today")

    monkeypatch.setattr(prewarming, "prewarm", fail)
    client = InProcessEngineClient(CONFIG)
    with caplog.at_level(logging.INFO):
        await client.hello()
        client.prewarm_model(ModelSpec("tiny", str(tmp_path)))
        info = await client.load_model(ModelSpec("tiny", str(tmp_path), kv_tokens=128))
        while "is not prewarmed" not in caplog.text:
            await client.hello()
    await client.close()
    assert info.name == "tiny"
    assert priorities == [min(19, os.getpriority(os.PRIO_PROCESS, 0) + 5)], "19 is the lowest priority"
    assert "tiny is not prewarmed: RuntimeError: no device today" in caplog.text


@pytest.mark.cpu_only
async def test_a_host_of_an_earlier_version_is_not_notified() -> None:
    sent: list[object] = []
    client = InProcessEngineClient(CONFIG)
    await client.hello()
    client.send = sent.append
    client._host_version = (3, 4)
    client.prewarm_model(ModelSpec("tiny", "/nowhere"))
    assert not sent
    del client.send
    await client.close()


@pytest.mark.cpu_only
def test_on_a_cpu_there_is_nothing_to_do() -> None:
    prewarm(ModelSpec("tiny", "/nowhere"), CONFIG)

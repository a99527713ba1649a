"""The facts that a host reports before it loads a model."""

import pytest
import torch

import pilotlight.engine.device.device
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.host.preparation import prepare
from pilotlight.engine.planning.memory_plan import beside_kv


def test_a_standby_beside_a_serving_host_reports_the_whole_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A standby takes over after the serving host has died, so the memory of that host will be free."""
    zeros = torch.zeros
    monkeypatch.setattr(pilotlight.engine.device.device, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None: zeros(*size))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 << 30, 80 << 30))
    prepared = prepare(HostConfig(device="cuda", kv_bytes=8 << 30), False, lambda: None)
    assert prepared.weights_bytes == beside_kv(80 << 30, 8 << 30) > 60 << 30

"""A host logs each reason why it computes more slowly than its machine could, unless it was configured so."""

from pathlib import Path

import pytest
import torch

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.device.fallbacks import fallbacks

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Return a root folder with the device files of two GPUs."""
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    return tmp_path


def test_a_gpu_that_auto_passes_over_is_named_with_what_hides_it(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (said,) = fallbacks(HostConfig(device="auto"), CPU, has_triton=False, root=machine)
    assert "this machine has 2 NVIDIA GPUs, and torch can use none (CUDA_VISIBLE_DEVICES is '')" in said
    assert "models run on the CPU" in said


def test_a_cpu_that_was_asked_for_or_is_all_there_is_is_no_fallback(machine: Path, tmp_path: Path) -> None:
    assert not fallbacks(HostConfig(device="cpu"), CPU, has_triton=False, root=machine)
    assert not fallbacks(HostConfig(device="auto"), CPU, has_triton=False, root=tmp_path / "without")
    assert not fallbacks(HostConfig(device="auto"), CUDA, has_triton=True, root=machine)


def test_a_gpu_without_triton_is_named(machine: Path) -> None:
    (said,) = fallbacks(HostConfig(device="cuda"), CUDA, has_triton=False, root=machine)
    assert said.startswith("cuda:0 runs torch's operations")
    assert said.endswith("Install pilotlight-inference[gpu]")


@pytest.mark.cpu_only
def test_the_log_and_the_greeting_say_it(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    from pilotlight.engine.host.preparation import prepare

    (said,) = prepare(HostConfig(device="auto"), False, lambda: None, root=machine).fallbacks
    assert "this machine has 2 NVIDIA GPUs" in said
    assert [record.levelname for record in caplog.records if record.message == said] == ["WARNING"]

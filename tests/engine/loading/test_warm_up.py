"""The warm-up of a model, which compiles kernels while weights are loaded, without delaying the load."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pilotlight.engine.loading.warm_up
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.loading.warm_up import BackgroundWarmUp
from pilotlight.engine.weights.load import FilledModel
from pilotlight.kernels.warm_up import WarmUp

CUDA = torch.device("cuda")


def unplannable() -> Any:
    raise ValueError("no such model")


def test_a_cpu_compiles_nothing() -> None:
    BackgroundWarmUp("m", unplannable, torch.device("cpu")).wait()


def test_what_a_process_remembers_is_made_ready_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dry_runs: list[str] = []
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "_ready", set())
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "takes_triton", lambda: True)
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "dry_run_launches", dry_runs.append)
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "compile_launches", lambda launches, device: WarmUp(1, 0.1))

    def run(name: str, computation: str | None) -> None:
        BackgroundWarmUp("m", lambda: name, CUDA, computation).wait()  # type: ignore[arg-type, return-value]

    for name, computation in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None), ("e", None)):
        run(name, computation)
    assert dry_runs == ["a", "c", "d", "e"]


def test_a_failed_preparation_is_done_by_the_next_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "_ready", set())
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "takes_triton", lambda: True)
    BackgroundWarmUp("m", unplannable, CUDA, "x").wait()
    assert not pilotlight.engine.loading.warm_up._ready


@pytest.mark.parametrize(
    ("device", "proved", "awaited", "both"), [("cpu", False, False, False), ("cuda", True, True, False)]
)
def test_an_awaited_model_waits_for_no_proof_twice(device: str, proved: bool, awaited: bool, both: bool) -> None:
    """A CPU skips the warm-up of a model that is proved or awaited; a GPU, which also loads kernels, only if both hold."""

    def needs(is_proved: bool, is_awaited: bool) -> bool:
        loading: Any = SimpleNamespace(
            arena=SimpleNamespace(device=torch.device(device)), spec=ModelSpec("m", "/m", is_awaited=is_awaited)
        )
        return ModelLoading.needs_warm_up(loading, FilledModel(None, True, None, is_proved=is_proved))  # type: ignore[arg-type]

    assert needs(False, False)
    assert needs(True, False) is proved
    assert needs(False, True) is awaited
    assert needs(True, True) is both


def test_a_model_whose_dry_run_fails_is_loaded_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "takes_triton", lambda: True)
    with caplog.at_level(logging.WARNING):
        BackgroundWarmUp("m", unplannable, CUDA).wait()
    assert "the dry run of m failed; its kernels are compiled at their first use" in caplog.text
    assert "no such model" in caplog.text


def test_all_is_compiled_once_it_has_been_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_launches(launches: Any, device: torch.device) -> WarmUp:
        compiled.append((launches, device))
        return WarmUp(1, 0.1)

    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "takes_triton", lambda: True)
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "dry_run_launches", lambda dry_run: [dry_run])
    monkeypatch.setattr(pilotlight.engine.loading.warm_up, "compile_launches", compile_launches)
    dry_run: Any = object()
    BackgroundWarmUp("m", lambda: dry_run, CUDA).wait()
    assert compiled == [([dry_run], CUDA)]

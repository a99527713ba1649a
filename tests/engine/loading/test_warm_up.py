"""The warm-up of a model, which compiles kernels while weights are loaded, without delaying the load."""

import logging
from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.loading.warm_up import BackgroundWarmUp
from pilotlight.engine.weights.load import FilledModel
from pilotlight.kernels.warm_up import WarmUp

CUDA = torch.device("cuda")


class Compiler:
    """A compiler that only records what it gets."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, torch.device]] = []

    def __call__(self, dry_run: Any, device: torch.device) -> WarmUp:
        self.compiled.append((dry_run, device))
        return WarmUp(1, 0.1)


def start(
    make_dry_run: Callable[[], Any], computation: str | None, compiler: Compiler, ready: set[Hashable]
) -> BackgroundWarmUp:
    return BackgroundWarmUp("m", make_dry_run, CUDA, computation, has_triton=True, compile_all=compiler, ready=ready)


def unplannable() -> Any:
    raise ValueError("no such model")


def test_a_cpu_compiles_nothing() -> None:
    BackgroundWarmUp("m", unplannable, torch.device("cpu"), has_triton=True).wait()


def test_what_a_process_remembers_is_made_ready_once() -> None:
    compiler, ready = Compiler(), set[Hashable]()

    def run(name: str, computation: str | None) -> None:
        start(lambda: name, computation, compiler, ready).wait()

    for name, computation in (("a", "x"), ("b", "x"), ("c", "y"), ("d", None), ("e", None)):
        run(name, computation)
    assert [dry_run for dry_run, _ in compiler.compiled] == ["a", "c", "d", "e"]


def test_a_failed_preparation_is_done_by_the_next_load() -> None:
    compiler, ready = Compiler(), set[Hashable]()
    start(unplannable, "x", compiler, ready).wait()
    start(lambda: "again", "x", compiler, ready).wait()
    assert compiler.compiled == [("again", CUDA)]


@pytest.mark.parametrize(
    ("device", "proved", "awaited", "both"), [("cpu", False, False, False), ("cuda", True, True, False)]
)
def test_an_awaited_model_waits_for_no_proof_twice(device: str, proved: bool, awaited: bool, both: bool) -> None:
    """A CPU skips the warm-up of a model that is proved or awaited; a GPU, which also loads kernels, only if both hold."""

    def needs(is_proved: bool, is_awaited: bool) -> bool:
        loading: Any = SimpleNamespace(
            arena=SimpleNamespace(device=torch.device(device)), spec=ModelSpec("m", "/m", is_awaited=is_awaited)
        )
        return ModelLoading.needs_warm_up(loading, FilledModel(None, True, None, is_proved=is_proved))

    assert needs(False, False)
    assert needs(True, False) is proved
    assert needs(False, True) is awaited
    assert needs(True, True) is both


def test_a_model_whose_dry_run_fails_is_loaded_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        start(unplannable, None, Compiler(), set()).wait()
    assert "the dry run of m failed; its kernels are compiled at their first use" in caplog.text
    assert "no such model" in caplog.text

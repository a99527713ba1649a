"""Models that leave a bootstrap program and are served by it, for tests: the fixtures are imported by name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.bootstrap import bootstrap_store
from pilotlight.engine.bootstrap.bootstrap_loader import BootstrapModel, find_model
from pilotlight.engine.bootstrap.recorder import BackgroundRecorder
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from tests.checkpoints import write_llama
from tests.cpu_kernels import C_LIBRARY, computing_with

CONFIG = HostConfig(threads=1, kv_bytes=16 << 20)
Leave = Callable[..., Engine]


@pytest.fixture(autouse=True)
def the_c_library_computes() -> Iterator[None]:
    with computing_with(C_LIBRARY):
        yield


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(bootstrap_store.SWITCH, str(tmp_path / "bootstrap"))
    return tmp_path / "bootstrap"


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """The engine of a model that has left its program, if it can."""
    writers: list[BackgroundRecorder] = []

    def begin(make: Any) -> BackgroundRecorder:
        writers.append(BackgroundRecorder(make, first_after_s=0.0))
        return writers[-1]

    monkeypatch.setattr("pilotlight.engine.loading.decoder_loading.BackgroundRecorder", begin)

    def leave(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> Engine:
        wanted = ModelSpec("tiny", str(directory), **spec)
        loaded = load_model(wanted, config, make_kv_memory(config), records_bootstrap=True)
        assert writers[-1].wait(60)
        return loaded.engine

    return leave


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    write_llama(directory)
    return directory


def found(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> BootstrapModel | None:
    model = find_model(ModelSpec("tiny", str(directory), **spec), config)
    if model is not None:
        sys.setswitchinterval(0.005)  # these tests keep it for themselves
    return model


def bootstrapped(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> BootstrapModel:
    model = found(directory, config, **spec)
    assert model is not None
    return model

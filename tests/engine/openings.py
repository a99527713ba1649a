"""Models that leave an opening program and are opened by it, for tests: the fixtures are imported by name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.loading import load_model, make_kv_memory
from engine.opening import kept
from engine.opening.making import Writing
from engine.opening.opener import OpenedModel, Opener
from engine.protocol import HostConfig, ModelSpec
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
    monkeypatch.setenv(kept.SWITCH, str(tmp_path / "openings"))
    return tmp_path / "openings"


@pytest.fixture
def leave(monkeypatch: pytest.MonkeyPatch) -> Leave:
    """The engine of a model that has left its program, if it can."""
    writers: list[Writing] = []

    def begin(make: Any) -> Writing:
        writers.append(Writing(make, first_after_s=0.0))
        return writers[-1]

    monkeypatch.setattr("engine.loading.Writing", begin)

    def leave(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> Engine:
        wanted = ModelSpec("tiny", str(directory), **spec)
        loaded = load_model(wanted, config, make_kv_memory(config), leaves_opening=True)
        assert writers[-1].wait(30)
        return loaded.engine

    return leave


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "llama"
    directory.mkdir()
    write_llama(directory)
    return directory


def opened(directory: Path, config: HostConfig = CONFIG, **spec: Any) -> OpenedModel:
    wanted = ModelSpec("tiny", str(directory), **spec)
    opener = Opener.find(directory, wanted.dtype, threads=1)
    assert opener is not None
    model = opener.open(wanted, config)
    assert model is not None
    return model

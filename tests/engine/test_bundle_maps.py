"""Memory maps of bundles: they are kept while models sleep, registered with a device, and released with their files."""

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.host.prewarming import prewarm
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.weights.bundles.bundle import lay_out
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.bundles.bundle_maps import MAPS, BundleMaps
from tests.checkpoints import write_llama
from tests.engine.driver import one, random_prompt, submit
from tests.engine.fake_copy_stream import FakeCopyStream
from tests.engine.test_bundles import FACTS, IDENTITY, WANTED, write

CPU = torch.device("cpu")
CONFIG = HostConfig(threads=1, kv_bytes=1 << 20)
REQUEST = submit("a", random_prompt(30, seed=3), max_tokens=3)


class FakeRegistered:
    """Fake registered memory: a device may copy its first `covered` bytes."""

    made: ClassVar["list[FakeRegistered]"] = []

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.memory = memory
        self.covered = 0
        self.is_started = self.is_closed = False
        self.made.append(self)

    def start(self) -> None:
        self.is_started = True

    def covers(self, start: int, end: int) -> bool:
        return end <= self.covered

    def split(self, start: int, end: int) -> list[tuple[int, int]]:
        edges = [start, *range(start - start % 1000 + 1000, end, 1000), end]
        return list(pairwise(edges))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def registered() -> list[FakeRegistered]:
    FakeRegistered.made = []
    return FakeRegistered.made


@pytest.fixture
def stream() -> FakeCopyStream:
    return FakeCopyStream()


@pytest.fixture
def maps(registered: list[FakeRegistered], stream: FakeCopyStream) -> BundleMaps:
    return BundleMaps(FakeRegistered, lambda device: cast("Any", stream))


@pytest.fixture
def written(tmp_path: Path) -> dict[str, torch.Tensor]:
    return write(tmp_path / "a", lay_out(IDENTITY, FACTS, WANTED))


def empty_like(written: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in written.items()}


def test_what_is_registered_as_a_whole_is_copied_across_the_edges_of_pieces(
    tmp_path: Path, written: dict[str, torch.Tensor], maps: BundleMaps, registered: list[FakeRegistered]
) -> None:
    into = empty_like(written)
    with BundleFile.open(tmp_path / "a") as file:
        maps.register(file, CPU)
        assert not maps.copy_registered(file, into, CPU), "none of it is registered yet"
        registered[0].covered = file.bundle.size - 1
        assert not maps.copy_registered(file, into, CPU), "the end is not registered yet"
        registered[0].covered = file.bundle.size
        assert maps.copy_registered(file, into, CPU)
    assert all(torch.equal(into[name], tensor) for name, tensor in written.items())


def test_what_is_copied_comes_behind_what_was_launched_and_few_copies_are_under_way(
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    maps: BundleMaps,
    registered: list[FakeRegistered],
    stream: FakeCopyStream,
) -> None:
    with BundleFile.open(tmp_path / "a") as file:
        maps.register(file, CPU)
        registered[0].covered = file.bundle.size
        assert maps.copy_registered(file, empty_like(written), CPU, most_copies=10)
    assert stream.events[0] == "wait for mark 1"
    between = "".join(event[0] for event in stream.events[1:]).split("w")
    assert len(stream.copied) > 300, "copies are made in pieces of 1,000 bytes"
    assert max(map(len, between)) == 10
    assert not stream.queue


def test_a_device_that_fails_has_no_copy_under_way_when_its_error_is_raised(
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    maps: BundleMaps,
    registered: list[FakeRegistered],
    stream: FakeCopyStream,
) -> None:
    """No copy may still write to the memory: it is freed after the error, and may belong to another model."""
    stream.num_until_failure = 7
    with BundleFile.open(tmp_path / "a") as file:
        maps.register(file, CPU)
        registered[0].covered = file.bundle.size
        with pytest.raises(RuntimeError, match="the device is gone"):
            maps.copy_registered(file, empty_like(written), CPU)
    assert (len(stream.copied), stream.queue) == (7, [])


def test_a_file_is_registered_once(
    tmp_path: Path, written: dict[str, torch.Tensor], maps: BundleMaps, registered: list[FakeRegistered]
) -> None:
    for _ in range(3):
        with BundleFile.open(tmp_path / "a") as file:
            maps.register(file, CPU)
    assert [one.is_started for one in registered] == [True]


def remove(path: Path) -> None:
    path.unlink()


def replace(path: Path) -> None:
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    copy.rename(path)


@pytest.mark.parametrize("change", [remove, replace])
def test_a_file_that_is_no_longer_there_is_let_go(
    tmp_path: Path,
    written: dict[str, torch.Tensor],
    maps: BundleMaps,
    registered: list[FakeRegistered],
    change: Callable[[Path], None],
) -> None:
    with BundleFile.open(tmp_path / "a") as file:
        maps.register(file, CPU)
        maps.drop_removed_maps()
        assert not registered[0].is_closed
        change(tmp_path / "a")
        maps.drop_removed_maps()
        assert registered[0].is_closed
        registered[0].covered = file.bundle.size
        assert not maps.copy_registered(file, empty_like(written), CPU)


def test_of_many_the_latest_used_stay(tmp_path: Path, maps: BundleMaps, registered: list[FakeRegistered]) -> None:
    for i in range(18):
        path = tmp_path / f"{i}"
        tensors = write(path, lay_out(IDENTITY, FACTS, WANTED))
        with BundleFile.open(path) as file:
            maps.register(file, CPU)
        with BundleFile.open(tmp_path / "0") as first:
            registered[0].covered = first.bundle.size
            assert maps.copy_registered(first, empty_like(tensors), CPU)
    assert [i for i, one in enumerate(registered) if one.is_closed] == [1, 2]


def test_a_file_that_may_not_be_written_to_is_not_registered(
    tmp_path: Path, written: dict[str, torch.Tensor], maps: BundleMaps, registered: list[FakeRegistered]
) -> None:
    class RefusedFile(BundleFile):
        def map(self, for_device: bool = False) -> torch.Tensor:
            raise PermissionError("no")

    with RefusedFile.open(tmp_path / "a") as file:
        maps.register(file, CPU)
        assert not registered
        assert not maps.copy_registered(file, empty_like(written), CPU)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's kernels and memory")
def test_a_prewarmed_host_loads_by_one_copy_and_answers_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "model")
    weights = Path("/dev/shm") / f"prewarmed-{os.getpid()}"  # a GPU cannot read directly from a file on a disk
    spec = ModelSpec("tiny", str(tmp_path / "model"), weights_file=str(weights), is_awaited=True)
    memory = make_kv_memory(CONFIG)
    first = load_model(spec, CONFIG, memory)
    expected = one(first.engine, REQUEST)
    first.close()
    prewarm(spec, CONFIG)
    assert MAPS.wait_registered(30)
    monkeypatch.setattr("pilotlight.engine.weights.load.fill", lambda jobs, tasks, report: _none(jobs))
    again = load_model(spec, CONFIG, memory)
    assert "warm_up" not in dict(again.engine.info.load_phases), "an awaited model needs no warm-up"
    assert one(again.engine, REQUEST).logprobs == expected.logprobs
    again.close()
    weights.unlink()


def _none(jobs: object) -> None:
    assert not jobs, "weights were read, although the device can copy them itself"

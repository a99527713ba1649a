"""GPUs through NVML: counted, measured, and checked for MIG, with a fake driver."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pilotlight.runtime.hosts import gpus
from pilotlight.runtime.hosts.devices import check_devices, is_surely_cpu
from pilotlight.runtime.hosts.gpus import Gpu, installed_gpus, read_gpus
from pilotlight.sites.config import ConfigError

GIB = 1 << 30


class FakeNvml:
    """A fake of NVML. `instances` has an entry for each GPU: None without MIG, else for each slot whether it has a MIG instance."""

    class NVMLError(Exception):
        pass

    def __init__(self, *instances: list[bool] | None, broken: bool = False) -> None:
        self.instances = instances
        self.broken = broken
        self.is_open = False

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.NVMLError("Driver/library version mismatch")
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.instances)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        assert self.is_open
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA H100"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=(80 + handle) * GIB)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: int) -> int:
        return len(self.instances[handle] or ())

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: int, place: int) -> int:
        places = self.instances[handle]
        if places is None or not places[place]:
            raise self.NVMLError("Not Found")
        return 100 * handle + place


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root directory of a machine with a driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    return tmp_path


def test_memory_and_instances_are_read_and_the_library_is_closed() -> None:
    nvml = FakeNvml(None, [True, False, True])
    assert read_gpus(nvml) == (Gpu("NVIDIA H100", 80 * GIB), Gpu("NVIDIA H100", 81 * GIB, 2))
    assert not nvml.is_open


def test_a_driver_that_cannot_answer_is_named_and_its_files_are_counted(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_devices(["cuda:0"], root=root, read_gpus=lambda: read_gpus(FakeNvml(broken=True)))
    assert "version mismatch" in caplog.text
    with pytest.raises(ConfigError, match="this machine shows one, cuda:0"):
        check_devices(["cuda:1"], root=root, read_gpus=lambda: None)


def test_gpus_are_counted_by_the_driver_and_not_by_its_files(root: Path) -> None:
    two = [Gpu("NVIDIA H100", 80 * GIB)] * 2
    check_devices(["cuda:0", "cuda:1"], root=root, read_gpus=lambda: two)
    with pytest.raises(ConfigError, match=r"'cuda:2' cannot be used: this machine shows 2, cuda:0 to cuda:1"):
        check_devices(["cuda:2"], root=root, read_gpus=lambda: two)
    assert not is_surely_cpu("auto", root, lambda: two)


def test_a_kv_cache_that_no_gpu_holds_is_refused_before_anything_starts(root: Path) -> None:
    found = [Gpu("NVIDIA L4", 24 * GIB), Gpu("NVIDIA H100", 80 * GIB)]
    check_devices(["cuda:0"], 80.0, root, lambda: found)
    with pytest.raises(ConfigError, match=r"kv_gib = 81 is more than NVIDIA H100 has, 80 GiB"):
        check_devices(["cuda:0"], 81.0, root, lambda: found)


def test_a_divided_gpu_is_left_to_the_engine_host_and_one_divided_into_nothing_is_refused(root: Path) -> None:
    check_devices(["cuda:3"], root=root, read_gpus=lambda: [Gpu("NVIDIA H100", 80 * GIB, 7)])
    assert not is_surely_cpu("auto", root, lambda: [Gpu("NVIDIA H100", 80 * GIB, 7)])
    with pytest.raises(ConfigError, match="in MIG mode but has no instances"):
        check_devices(["cuda:0"], root=root, read_gpus=lambda: [Gpu("NVIDIA H100", 80 * GIB, 0)])


def test_no_driver_is_asked_if_none_is_loaded_or_the_user_names_the_devices(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never() -> None:
        raise AssertionError("NVML was asked")

    (root / "dev" / "nvidia0").unlink()
    assert is_surely_cpu("auto", root, never)
    (root / "dev" / "nvidia0").touch()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    check_devices(["cuda:0"], 999.0, root, never)


def test_without_the_library_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    installed_gpus.cache_clear()
    with caplog.at_level("INFO", gpus.log.name):
        assert installed_gpus() is None
    assert "install pilotlight-inference[gpu]" in caplog.text
    installed_gpus.cache_clear()

"""Check that the devices in a site file exist and are large enough, before anything is started.

It uses device files, and the data of NVML (gpus.py). If neither is available, the engine host checks.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.planning.devices import GPUS, DeviceSet, cpu
from pilotlight.runtime.hosts.gpus import Gpu, installed_gpus
from pilotlight.runtime.hosts.memory import GIB, gib
from pilotlight.sites.config import ConfigError

ReadGpus = Callable[[], Sequence[Gpu] | None]

_OTHER_KINDS = ("dxg", "nvmap", "kfd")  # device files of GPUs on Windows (WSL), on Tegra, and from AMD


def check_devices(
    devices: Sequence[str], kv_gib: float = 0.0, root: Path = Path("/"), read_gpus: ReadGpus = installed_gpus
) -> None:
    """Check a site file's devices.

    Raises ConfigError if this machine does not have a GPU, or if a GPU is smaller than its KV cache.
    """
    numbers = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    if not numbers:
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES") is None and (gpus := _told(root, read_gpus)):
        _check_gpus(gpus, kv_gib)
    if (count := _num_gpus(root, read_gpus)) is None:
        return
    if missing := [number for number in numbers if number >= count]:
        has = "no NVIDIA GPU" if count == 0 else "one, cuda:0" if count == 1 else f"{count}, cuda:0 to cuda:{count - 1}"
        raise ConfigError(
            f"engine device 'cuda:{missing[0]}' cannot be used: this machine shows {has}; correct engine.device or engine.devices"
        )


def this_machine(read_gpus: ReadGpus = installed_gpus) -> DeviceSet:
    """Return this machine's devices for a plan. Raises CheckpointError.

    They are its GPUs, assumed to be like the first one, or else its CPU."""
    gpus = read_gpus() or ()
    if not gpus:
        return DeviceSet(1, cpu())
    known = next((device for name, device in GPUS.items() if name in gpus[0].name.lower()), None)
    if known is None:
        raise CheckpointError(f"the speed of {gpus[0].name} is unknown; set --devices to one of {', '.join(GPUS)}")
    return DeviceSet(len(gpus), known._replace(memory_bytes=gpus[0].total_bytes))


def is_surely_cpu(device: str, root: Path = Path("/"), read_gpus: ReadGpus = installed_gpus) -> bool:
    """Return whether the device is certainly a CPU, before its engine host has reported what it is."""
    return device == "cpu" or (device == "auto" and _num_gpus(root, read_gpus) == 0)


def _check_gpus(gpus: Sequence[Gpu], kv_gib: float) -> None:
    if all(gpu.num_instances == 0 for gpu in gpus):
        raise ConfigError(
            f"no CUDA device can be used: {gpus[0].name} is in MIG mode but has no instances; create some, or turn MIG off"
        )
    largest = max(gpus, key=lambda gpu: gpu.total_bytes)
    if kv_gib * GIB > largest.total_bytes:
        raise ConfigError(
            f"engine.kv_gib = {kv_gib:g} is more than {largest.name} has, {gib(largest.total_bytes)}; lower it"
        )


def _num_gpus(root: Path, read_gpus: ReadGpus) -> int | None:
    """Return the number of CUDA devices that a process finds; None if it is unknown."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [entry for entry in visible.split(",") if entry.strip()]
        return 0 if listed[:1] == ["-1"] else len(listed)
    if any((root / "dev" / name).exists() for name in _OTHER_KINDS):
        return None
    gpus = _told(root, read_gpus)
    if gpus is None:
        return len(_device_files(root))
    # CUDA lets a process use only one MIG instance, so with MIG the number of GPUs is not the number of devices.
    return None if any(gpu.num_instances is not None for gpu in gpus) else len(gpus)


def _told(root: Path, read_gpus: ReadGpus) -> Sequence[Gpu] | None:
    """Return NVML's GPUs; None if there is no device file and thus no driver."""
    return read_gpus() if _device_files(root) else None


def _device_files(root: Path) -> list[Path]:
    return [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]

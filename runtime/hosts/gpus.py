"""A machine's NVIDIA GPUs, as reported by their driver: memory and number of MIG instances.

Uses NVML, which needs neither CUDA nor torch; imported only if a driver is loaded. Independent of their use.
"""

import logging
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

log = logging.getLogger("pilotlight.engine")


class Gpu(NamedTuple):
    name: str
    total_bytes: int
    num_instances: int | None = None  # None if MIG is off, and the GPU is one device


@cache
def installed_gpus() -> tuple[Gpu, ...] | None:
    """Return all GPUs in the driver's order.

    None if they cannot be queried; the reason is logged."""
    try:
        import pynvml
    except ImportError:
        log.info(
            "GPUs are counted by their device files alone: install pilotlight-inference[gpu] for their memory and instances"
        )
        return None
    return read_gpus(pynvml)


def read_gpus(nvml: Any) -> tuple[Gpu, ...] | None:
    """Ask the driver. `nvml`: the module of nvidia-ml-py, or what looks like it."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return tuple(_read_gpu(nvml, handle) for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        log.warning("NVML cannot say which GPUs there are: %s", error)
        return None


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    most = 0
    with suppress(nvml.NVMLError):  # a driver older than MIG
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)  # 0 out of MIG mode
    return Gpu(name, memory.total, _num_instances(nvml, handle, most) if most else None)


def _num_instances(nvml: Any, handle: Any, most: int) -> int:
    """Count the instances; asking for a missing one is an error."""
    found = 0
    for i in range(most):
        with suppress(nvml.NVMLError):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            found += 1
    return found

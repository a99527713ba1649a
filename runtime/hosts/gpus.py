"""A machine's NVIDIA GPUs, as reported by their driver: memory and number of MIG instances.

It uses NVML, which needs neither CUDA nor torch, and imports it only if a driver is loaded. Independent of how the GPUs are used.
"""

import logging
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

log = logging.getLogger("pilotlight.engine")


class Gpu(NamedTuple):
    name: str
    total_bytes: int
    num_instances: int | None = None  # None if MIG is off, so that the GPU is a single device


@cache
def installed_gpus() -> tuple[Gpu, ...] | None:
    """Return all GPUs in the driver's order; None if they cannot be queried (the reason is logged)."""
    try:
        import pynvml
    except ImportError:
        log.info(
            "GPUs are only counted by their device files: install pilotlight-inference[gpu] to read their memory and instances"
        )
        return None
    return read_gpus(pynvml)


def read_gpus(nvml: Any) -> tuple[Gpu, ...] | None:
    """Query the driver. `nvml` is the module of nvidia-ml-py, or a substitute with its functions."""
    try:
        nvml.nvmlInit()
        try:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
            return tuple(_read_gpu(nvml, handle) for handle in handles)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        log.warning("NVML cannot list the GPUs: %s", error)
        return None


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    name, memory = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
    most = 0
    with suppress(nvml.NVMLError):  # the driver is older than MIG
        most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)  # 0 if MIG is off
    return Gpu(name, memory.total, _num_instances(nvml, handle, most) if most else None)


def _num_instances(nvml: Any, handle: Any, most: int) -> int:
    """Count the GPU's MIG instances; NVML raises an error for a missing one."""
    found = 0
    for i in range(most):
        with suppress(nvml.NVMLError):
            nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, i)
            found += 1
    return found

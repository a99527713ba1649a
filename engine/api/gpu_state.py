"""The state of a machine's GPUs as reported by their driver, through NVML, without CUDA and torch.

The state contains clocks, power, temperature, reasons for reduced clocks, memory errors and used memory. Values that a driver or device does not
report are omitted. This module only reads these values.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

GpuState = dict[str, float]

# Bits of nvmlClocksEventReasons, except those for idle GPUs and for clocks that the user has set.
_SLOWED_BY = {
    "power_cap": 0x4, "hardware": 0x8, "sync_boost": 0x10, "software_heat": 0x20, "hardware_heat": 0x40, "power_brake": 0x80,
}  # fmt: skip


def read_states() -> tuple[GpuState, ...]:
    """Return the state of every GPU, in the driver's order; empty without a driver or nvidia-ml-py."""
    nvml = _driver()
    return () if nvml is None else states_of(nvml)


@cache
def _driver() -> Any | None:
    """Open the driver's library once per process, because that takes far longer than a query."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def states_of(nvml: Any) -> tuple[GpuState, ...]:
    """Return the state of every GPU. `nvml`: the initialised module of nvidia-ml-py, or a fake."""
    try:
        return tuple(_state(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError:
        return ()


def _state(nvml: Any, gpu: Any) -> GpuState:
    reasons = _reading(nvml, lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(gpu))
    memory = _reading(nvml, lambda: nvml.nvmlDeviceGetMemoryInfo(gpu))
    known = {
        "sm_clock_mhz": _reading(nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)),
        "memory_clock_mhz": _reading(nvml, lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_MEM)),
        "power_watts": _reading(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
        "power_limit_watts": _reading(nvml, lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000),
        "temperature_celsius": _reading(nvml, lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        "ecc_uncorrected_errors": _reading(
            nvml,
            lambda: nvml.nvmlDeviceGetTotalEccErrors(
                gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
        ),
        "memory_used_bytes": None if memory is None else memory.used,
        "memory_total_bytes": None if memory is None else memory.total,
    }
    slowed = {} if reasons is None else {f"slowed_by_{name}": bool(reasons & bit) for name, bit in _SLOWED_BY.items()}
    return {name: float(value) for name, value in (known | slowed).items() if value is not None}


def _reading(nvml: Any, read: Callable[[], Any]) -> Any:
    """Return the result of `read`, or None if the driver, the device or a missing permission prevents it."""
    try:
        return read()
    except (nvml.NVMLError, AttributeError):
        return None

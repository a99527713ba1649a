"""The memory and speed of devices: published figures for GPUs, measured ones for a CPU."""

import os
import re
from collections.abc import Callable
from typing import NamedTuple

from pilotlight.engine.api.errors import CheckpointError

GIB = 1 << 30


class Efficiency(NamedTuple):
    """Shares of a device's peak speeds that steps reach."""

    decode: float  # share of memory bandwidth
    prefill: float  # share of bf16 FLOP/s
    source: str


# load_tests/results/2026-11-26-nvidia-h100-80gb-hbm3-engine-8b.json: medians over decodes of 1 to 256 sequences and prompts of 512 to 32,768 tokens,
# as shares of the data sheet's speeds.
_MEASURED_H100 = Efficiency(0.68, 0.58, "the record of 2026-11-26 on an H100")
_ASSUMED = _MEASURED_H100._replace(source="assumed: an H100's shares; there is no record on this device")
# load_tests/results/2026-11-21-amd-epyc-engines.json: median of decodes of 1, 4 and 16 sequences; prompts of 4,096 tokens.
_MEASURED_CPU = Efficiency(0.71, 0.76, "the record of 2026-11-21 on an AMD EPYC")


class Device(NamedTuple):
    name: str
    memory_bytes: int  # memory that a program can use
    bytes_per_s: float  # memory bandwidth
    flop_per_s: float  # peak for bf16, dense
    link_bytes_per_s: float  # bandwidth to another device, one way
    efficiency: Efficiency
    source: str  # source of the figures

    @property
    def is_cpu(self) -> bool:
        return self.name == "cpu"


_TERA, _GIGA = 1e12, 1e9
# Memory is the total that CUDA reports; speeds are those of the data sheets for SXM modules, without sparsity, links one way.
GPUS = {
    "h100": Device("h100", int(79.1 * GIB), 3.35 * _TERA, 989 * _TERA, 450 * _GIGA, _MEASURED_H100, "NVIDIA's H100 SXM data sheet"),
    "h200": Device("h200", int(139.8 * GIB), 4.8 * _TERA, 989 * _TERA, 450 * _GIGA, _ASSUMED, "NVIDIA's H200 SXM data sheet"),
    "a100": Device("a100", int(79.1 * GIB), 2.039 * _TERA, 312 * _TERA, 300 * _GIGA, _ASSUMED, "NVIDIA's A100 80GB SXM data sheet"),
    "l40s": Device("l40s", int(44.4 * GIB), 0.864 * _TERA, 362 * _TERA, 32 * _GIGA, _ASSUMED, "NVIDIA's L40S data sheet; PCIe 4 x16"),
}  # fmt: skip


class DeviceSet(NamedTuple):
    """A number of devices of one kind."""

    number: int
    device: Device

    def __str__(self) -> str:
        return f"{self.number}x{self.device.name}"


def cpu(
    bytes_per_s: float = 49.8 * _GIGA,
    flop_per_s: float = 0.95 * _TERA,
    source: str = "ceilings measured on two cores of an AMD EPYC",
) -> Device:
    """Return this machine's CPU. Its speeds default to those of a machine with units for bf16."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Device("cpu", there, bytes_per_s, flop_per_s, 10 * _GIGA, _MEASURED_CPU, source)


def parse_devices(text: str, this_machine: Callable[[], DeviceSet]) -> DeviceSet:
    """Parse devices as in a command line: 8xh100, h200, cpu, 2xcpu, this-machine. Raises CheckpointError."""
    if text.replace("-", " ").strip().lower() in ("this machine", "this", "here"):
        return this_machine()
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z0-9]+)", text.strip().lower())
    count = int(found[1] or 1) if found else 0
    name = found[2] if found else ""
    if not count or name not in (*GPUS, "cpu"):
        raise CheckpointError(
            f"{text!r} names no devices; use NUMBERxKIND such as 8xh100, with {', '.join(GPUS)} or cpu, or this-machine"
        )
    return DeviceSet(count, cpu() if name == "cpu" else GPUS[name])

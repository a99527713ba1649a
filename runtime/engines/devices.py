"""Whether the devices that a site file names are there, asked before anything is started.

Knows what the NVIDIA driver shows in the file system; where that says nothing, the engine host finds out for itself.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from sites.config import ConfigError


def check_devices(devices: Sequence[str], root: Path = Path("/")) -> None:
    """Raises ConfigError for a GPU that this machine does not have."""
    numbers = [int(device.partition(":")[2] or 0) for device in devices if device.startswith("cuda")]
    if not numbers or (count := _num_gpus(root)) is None:
        return
    if missing := [number for number in numbers if number >= count]:
        has = "no NVIDIA GPU" if count == 0 else "one, cuda:0" if count == 1 else f"{count}, cuda:0 to cuda:{count - 1}"
        raise ConfigError(
            f"engine device 'cuda:{missing[0]}' cannot be used: this machine shows {has}; correct engine.device or engine.devices"
        )


def is_surely_cpu(device: str, root: Path = Path("/")) -> bool:
    """Before an engine host has said so."""
    return device == "cpu" or (device == "auto" and _num_gpus(root) == 0)


def _num_gpus(root: Path) -> int | None:
    """None: there is no telling."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [entry for entry in visible.split(",") if entry.strip()]
        return 0 if listed[:1] == ["-1"] else len(listed)
    if any(
        (root / "dev" / name).exists() for name in ("dxg", "nvmap", "kfd")
    ):  # Windows, Tegra and AMD show their GPUs in other ways
        return None
    shown = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return len(shown)

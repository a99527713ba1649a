"""Detects fallbacks of an engine host, which are logged at its start: an unused GPU, missing kernels.

This module compares the requested settings with the available hardware; it does not find out why a driver fails.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import HostConfig

if TYPE_CHECKING:
    import torch


def fallbacks(config: HostConfig, device: "torch.device", *, has_triton: bool, root: Path = Path("/")) -> Sequence[str]:
    """Return a log message for each fallback that was not requested.

    `has_triton`: a CUDA device uses Triton's kernels.
    """
    found = []
    gpus = [path for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if config.device == "auto" and device.type == "cpu" and gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        found.append(
            f"device is auto, this machine has {len(gpus)} NVIDIA GPU{'s' * (len(gpus) > 1)}, and torch can use none{hidden}: models run on the CPU. "
            "Install a torch that is built for CUDA, or a driver that is new enough for it; set device = 'cpu' if this is intended"
        )
    if device.type == "cuda" and not has_triton:
        found.append(
            f"{device} runs torch's operations, since Triton is not installed or PILOTLIGHT_TRITON is 0: steps take several times as long. "
            "Install pilotlight-inference[gpu]"
        )
    return found

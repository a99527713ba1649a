"""A checkpoint's calibrated scales for a KV cache in FP8: one for keys and one for values per layer.

This module knows their names (`self_attn.k_scale` from compressed-tensors; `self_attn.k_proj.k_scale` from ModelOpt, with `mixer` instead of
`self_attn` in Nemotron), and is independent of the cache.
"""

import re
from pathlib import Path

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.checkpoint import index_checkpoint, packed_file
from pilotlight.engine.weights.stored_tensor import StoredTensor
from pilotlight.engine.weights.tensor_bytes import DTYPES

_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:self_attn|mixer)\.(?:[kv]_proj\.)?([kv])_scale")


def read_kv_scales(directory: Path) -> dict[int, tuple[float, float]]:
    """Return {layer: (scale of keys, scale of values)} for the layers that have scales.

    A packed checkpoint has none. Raises CheckpointError for an invalid scale.
    """
    if packed_file(directory) is not None:
        return {}
    found: dict[int, dict[str, float]] = {}
    for name, stored in index_checkpoint(directory).items():
        if (match := _NAME.fullmatch(name)) is not None:
            found.setdefault(int(match[1]), {})[match[2]] = _scale(name, stored)
    return {layer: (of.get("k", 1.0), of.get("v", 1.0)) for layer, of in found.items()}


def _scale(name: str, stored: StoredTensor) -> float:
    if stored.shape not in ((), (1,)):
        raise CheckpointError(
            f"{name} has shape {list(stored.shape)}: FP8 needs one scale for all heads of a layer here"
        )
    if stored.dtype not in DTYPES:
        raise CheckpointError(f"{name} has type {stored.dtype}, which is not a type of scales")
    with stored.file.open("rb") as file:
        file.seek(stored.start)
        content = bytearray(file.read(stored.end - stored.start))
    scale = float(torch.frombuffer(content, dtype=DTYPES[stored.dtype])[0])
    if not 0 < scale < float("inf"):
        raise CheckpointError(
            f"{name} is {scale}, but a scale must be positive: leave kv_dtype at auto, or repair the checkpoint"
        )
    return scale

"""A loader for tensors that a test has written: whole ones, or the part of one rank."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file

from pilotlight.engine.weights.filling import fill
from pilotlight.engine.weights.formats.format import WeightFormat
from pilotlight.engine.weights.fused import FusedRows
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import WHOLE, Shard
from pilotlight.engine.weights.source import open_divided
from pilotlight.engine.weights.storage import CheckpointStorage, on_device

T = TypeVar("T")
CPU = torch.device("cpu")


def write_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")


def load(
    directory: Path,
    ask: Callable[[WeightLoader], T],
    format: WeightFormat | None = None,
    keeps_packed: bool = False,
    shard: Shard = WHOLE,
    dtype: torch.dtype = torch.float32,
    fused: tuple[FusedRows, ...] = (),
) -> T:
    """Load the weights that `ask` requests. Raises CheckpointError if other tensors are in the directory."""
    checkpoint = open_divided(directory, fused)
    storage = CheckpointStorage(checkpoint, on_device(CPU))
    asked = ask(WeightLoader(storage, dtype, CPU, format, keeps_packed, shard))
    checkpoint.refuse_unrequested()
    fill(storage.jobs, storage.tasks)
    return asked

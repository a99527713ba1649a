"""Computes sums of x^T x over the inputs x of a model's matrices for a text, for rounding with GPTQ.

The model is loaded with matrices that add up these products while they multiply, so every family is calibrated by its own forward pass. Experts are
left out: each gets only its own tokens, and a short text has few of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from pilotlight.engine.api.errors import CheckpointError, TokenizerError
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.planning.model_plan import choose_dtype_name
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.engine.weights.checkpoint import Checkpoint
from pilotlight.engine.weights.config import read_config
from pilotlight.engine.weights.filling import ReadingProgress, fill
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Split
from pilotlight.engine.weights.source import DTYPE_NAMES
from pilotlight.engine.weights.storage import CheckpointStorage, on_device
from pilotlight.kernels.matrices.plain import PlainWeight
from pilotlight.kernels.matrices.weight import GatedActivation, Weight

_CPU = torch.device("cpu")
_CHUNK_TOKENS, _MOST_CHUNKS = 512, 128
_LEAST_TOKENS = 64
_BLOCK_TOKENS = 16
_MOST_BYTES = 16 << 30  # limit for the memory of all sums


@dataclass(frozen=True, slots=True, eq=False)
class ObservedWeight(PlainWeight):
    """A plain matrix that adds x^T x of its inputs to `sums`."""

    sums: Tensor  # [columns, columns] fp32

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        wide = x.float()
        self.sums.addmm_(wide.T, wide)
        return PlainWeight.linear(self, x, bias)

    def gated(self, x: Tensor, bias: Tensor | None, activation: GatedActivation) -> Tensor:
        return Weight.gated(self, x, bias, activation)


class _ObservingLoader(WeightLoader):
    """Makes an ObservedWeight of each matrix named in `wanted`.

    Matrices in one tensor have the same inputs, and share the sums."""

    def __init__(self, storage: CheckpointStorage, dtype: torch.dtype, wanted: set[str]) -> None:
        super().__init__(storage, dtype, _CPU)
        self.sums: dict[str, Tensor] = {}
        self._wanted = wanted

    def matrix(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, experts: int = 1, split: Split | None = None,
        unit: int | Sequence[int] = 1, repeats: bool = False,
    ) -> Weight:  # fmt: skip
        weight = super().matrix(names, rows, columns, experts=experts, split=split, unit=unit, repeats=repeats)
        if experts > 1 or not self._wanted.issuperset(names) or not isinstance(weight, PlainWeight):
            return weight
        num_bytes = 4 * columns * columns + sum(
            sums.nbytes for sums in {id(one): one for one in self.sums.values()}.values()
        )
        if num_bytes > _MOST_BYTES:
            raise CheckpointError(
                f"the sums of the observed inputs take more than {_MOST_BYTES >> 30} GiB; round this model without calibration"
            )
        sums = torch.zeros(columns, columns)
        self.sums |= dict.fromkeys(names, sums)
        return ObservedWeight(weight.values, sums)


@torch.inference_mode()
def observe(directory: Path, text: str, wanted: set[str], on_progress: ReadingProgress) -> dict[str, Tensor]:
    """Return the sum of x^T x [columns, columns] for each matrix in `wanted`. Raises CheckpointError."""
    raw = read_config(directory)
    family = find_family(raw)
    config = family.parse_config(raw)
    chunks = _chunks(directory, text, min(config.context_length, _CHUNK_TOKENS))
    checkpoint = Checkpoint.open(directory)
    numbers = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    dtype = DTYPE_NAMES[choose_dtype_name(numbers, frozenset(checkpoint.facts.dtypes), on_cpu=True)]
    storage = CheckpointStorage(checkpoint, on_device(_CPU))
    loader = _ObservingLoader(storage, dtype, wanted)
    model = family.load(config, loader, config.context_length)
    fill(storage.jobs, storage.tasks)
    layout = CacheLayout(config.cached_layers, _BLOCK_TOKENS, dtype, config.context_length)
    blocks = layout.new_blocks(len(layout.groups) * -(-(_CHUNK_TOKENS + 1) // layout.block_size), _CPU)
    runner = ModelRunner(model, layout, blocks)
    for i, chunk in enumerate(chunks):
        runner.warm_up(chunk, with_decode=False)
        on_progress(i + 1, len(chunks))
    return loader.sums


def _chunks(directory: Path, text: str, size: int) -> list[tuple[int, ...]]:
    try:
        tokens = Tokenizer.from_directory(directory).encode(text)
    except TokenizerError as error:
        raise CheckpointError(f"the text cannot be read by the model's tokenizer: {error}") from None
    if len(tokens) < _LEAST_TOKENS:
        raise CheckpointError(f"the text to calibrate with has {len(tokens)} tokens; give {_LEAST_TOKENS} or more")
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    return [chunk for chunk in chunks if len(chunk) >= _LEAST_TOKENS][:_MOST_CHUNKS]

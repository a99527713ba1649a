"""Finds the kernel launches of a model by a dry run on `meta`, before its weights are loaded.

The run covers steps of all shapes that determine which variants of kernels are needed. A variant that the dry run does not launch is compiled at its
first use. This module is independent of kernels.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pilotlight.engine.api.protocol import Pooling
from pilotlight.engine.description.config_registry import ArchitectureConfig
from pilotlight.engine.execution.batch import Batch, DecodeBatch, GroupBatch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.pooling import PIECES
from pilotlight.engine.execution.state_places import run_ends
from pilotlight.engine.kv.pool.layout import CacheLayout, LayerCache
from pilotlight.engine.models.decoder import Decoder, Layer
from pilotlight.engine.models.model import Family, Model
from pilotlight.engine.weights.formats.format import WeightFormat
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import WHOLE, Shard
from pilotlight.engine.weights.storage import MetaStorage
from pilotlight.kernels.attention.varlen import VarlenBatch
from pilotlight.kernels.pooling import pool_pieces
from pilotlight.kernels.sampling.logprobs import token_logprobs
from pilotlight.kernels.sampling.masks import mask_
from pilotlight.kernels.sampling.penalties import LogitEntries, penalize_, restore_
from pilotlight.kernels.sampling.sample import sample
from pilotlight.kernels.sampling.sampling_batch import SamplingBatch, SamplingRow
from pilotlight.kernels.state.state_batch import StateBatch
from pilotlight.kernels.warm_up import fake_tensor, trace_launches

if TYPE_CHECKING:
    from pilotlight.kernels.triton.jit import Launch

# The steps of the dry run: (rows, context) of decodes, and lengths of prompts. There is a step for each tile that a product may use, for few and many
# programs, and for contexts that are split and that are not. No kernel depends on an exact length, so other lengths need no step.
DECODES = ((1, 10), (1, 4096), (2, 100), (4, 100), (16, 300), (32, 300), (64, 4096), (256, 300))
PROMPTS = ((1, 8), (40,), (3, 500), (2048,), (4096, 4096))
BEHIND_PREFIX = (1, 2, 4, 8)  # tokens of chunks that follow a cached prefix
WITH_IMAGES = (8, 40, 300)  # tokens of chunks whose queries see later keys of their image
_PREFIX = 4000
_DRAW = SamplingRow(1.0, 20, 0.9, 0.0, 0, 0)  # a sampled row; greedy rows use torch
_NUM_BLOCKS = 64  # size of the cache, which takes no memory on `meta`


class DryRun(NamedTuple):
    """A model to be loaded, and the options of its load."""

    family: Family
    config: ArchitectureConfig
    storage: MetaStorage
    dtype: torch.dtype
    context_length: int
    layout: CacheLayout
    pooling: Pooling | None = None
    format: WeightFormat | None = None
    stays_packed: bool = False  # whether its weights stay packed on the device
    shard: Shard = WHOLE  # this rank's part; transfers between ranks use no compiled kernels
    scores_classes: bool = False  # the model's head scores classes after pooling


def dry_run_launches(dry_run: DryRun) -> "list[Launch]":
    """Return the kernel launches of all steps of the dry run."""
    return trace_launches(lambda: _run(dry_run))


def _run(dry_run: DryRun) -> None:
    model = lay_out(dry_run)
    layout = dry_run.layout
    cache = layout.views(fake_tensor((_NUM_BLOCKS, layout.block_bytes), torch.uint8))
    if isinstance(model, Decoder):
        model.layers = distinct_layers(model, dry_run, cache)
    for batch in batches(dry_run):
        hidden = model.forward(Context(batch, cache))
        if dry_run.pooling is not None:
            prefill = batch.groups[0].prefill
            lens = prefill.host_q_lens if prefill is not None else (1,) * len(hidden)
            pool_pieces(hidden, fake_tensor((len(lens) + 1,), torch.int32), lens, PIECES[dry_run.pooling])
            if dry_run.scores_classes:
                model.logits(hidden[: len(lens)])
        elif batch.groups[0].prefill is None:
            _choose(model, hidden)


def distinct_layers(model: Decoder, dry_run: DryRun, cache: Sequence[LayerCache]) -> list[Layer]:
    """Return the first layer, which has no residual, and one layer for each set of launches.

    Running all layers in all batches would hold the GIL for seconds, but the threads that read weights need it.
    """
    from pilotlight.kernels.triton.jit import tracing

    block_size, num_groups = dry_run.layout.block_size, len(dry_run.layout.groups)
    of_each_kind = [prompt_batch((40,), block_size, num_groups)]
    if dry_run.layout.layers:
        of_each_kind.append(decode_batch(2, 100, block_size, num_groups))
    steps = [model.entered(Context(batch, cache)) for batch in of_each_kind]
    kinds: dict[tuple[Any, ...], Layer] = {}
    for layer in model.layers:
        with tracing() as launches:
            for x, context in steps:
                layer(x, x, context)
        kinds.setdefault(tuple(launch.variant for launch in launches), layer)
    return [*model.layers[:1], *kinds.values()]


def lay_out(dry_run: DryRun) -> Model:
    """Return the model on `meta`."""
    storage = dry_run.storage
    device = torch.device("meta")
    loader = WeightLoader(storage, dry_run.dtype, device, dry_run.format, dry_run.stays_packed, dry_run.shard)
    return dry_run.family.load(dry_run.config, loader, dry_run.context_length)


def batches(dry_run: DryRun) -> Iterator[Batch]:
    block_size, num_groups = dry_run.layout.block_size, len(dry_run.layout.groups)
    if dry_run.layout.layers:
        for rows, context in DECODES:
            yield decode_batch(rows, min(context, dry_run.context_length), block_size, num_groups)
    for lens in (
        *PROMPTS,
        (block_size,),
        (64,),
    ):  # the last two are short and fill whole blocks, for the case in which latent attention expands keys and values
        yield prompt_batch(tuple(min(length, dry_run.context_length) for length in lens), block_size, num_groups)
    for length in BEHIND_PREFIX if dry_run.layout.layers else ():
        yield prompt_batch((length,), block_size, num_groups, min(_PREFIX, dry_run.context_length - length))
    for length in WITH_IMAGES if dry_run.config.image_needs(dry_run.dtype.itemsize).step_tokens else ():
        yield prompt_batch((min(length, dry_run.context_length),), block_size, num_groups, has_images=True)


def decode_batch(rows: int, context: int, block_size: int, num_groups: int = 1) -> Batch:
    tables = fake_tensor((rows, -(-context // block_size)), torch.int64)
    decode = DecodeBatch(tables, fake_tensor((rows,), torch.int64), context)
    return _batch(rows, num_groups, decode, None, run_ends((1,) * rows, (context,) * rows, rows, block_size))


def prompt_batch(
    lens: tuple[int, ...], block_size: int, num_groups: int = 1, prefix: int = 0, *, has_images: bool = False
) -> Batch:
    """`has_images`: some tokens are of images and see each other."""
    tables = fake_tensor((len(lens), -(-(prefix + max(lens)) // block_size)), torch.int64)
    starts, contexts = fake_tensor((len(lens) + 1,), torch.int32), fake_tensor((len(lens),), torch.int32)
    whole = tuple(prefix + length for length in lens)
    ahead = fake_tensor((sum(lens),), torch.int32) if has_images else None
    prefill = VarlenBatch(tables, starts, contexts, lens, whole, ahead)
    return _batch(sum(lens), num_groups, None, prefill, run_ends(lens, whole, 0, block_size))


def _batch(
    tokens: int,
    num_groups: int,
    decode: DecodeBatch | None,
    prefill: VarlenBatch | None,
    ends: Iterator[tuple[int, ...]],
) -> Batch:
    """`ends`: of the runs of each sequence, for layers that keep states."""
    ids, positions, slots = (fake_tensor((tokens,), torch.int64) for _ in range(3))
    host_ends = tuple(ends)
    sequences, runs = len(host_ends), sum(map(len, host_ends))
    sizes = (sequences, sequences + 1, runs, runs)
    before, first_runs, of_runs, after = (fake_tensor((size,), torch.int64) for size in sizes)
    states = StateBatch(before, first_runs, of_runs, after, host_ends)
    group = GroupBatch(slots, decode, prefill=prefill, states=states)
    return Batch(ids, positions, (group,) * num_groups, tokens if decode is not None else 0)


def _choose(model: Model, hidden: torch.Tensor) -> None:
    logits = model.logits(hidden)
    rows, vocab = logits.shape
    ids, _ = sample(logits, SamplingBatch.of([_DRAW] * rows, vocab, _pretended))
    token_logprobs(logits, ids, 5)
    integers = [fake_tensor((7,), torch.int64) for _ in range(2)]
    entries = LogitEntries(*integers, *(fake_tensor((7,), torch.float32) for _ in range(6)))
    restore_(logits, entries, penalize_(logits, entries))
    mask_(logits, integers[0], fake_tensor((7, -(-vocab // 32)), torch.int32))


def _pretended(tensor: torch.Tensor) -> Any:
    return fake_tensor(tensor.shape, tensor.dtype)

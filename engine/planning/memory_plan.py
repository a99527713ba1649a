"""Computes how a device's memory is divided: weights, a step's needs, reserves and the KV cache.

The only module that does this: for `pilotlight plan`, for the size of a host's arena, and for the choice of models that may be awake together. It
uses formulas and runs nothing.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.description.tensor_sizes import Part, WeightShape
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, in_fp8
from pilotlight.engine.planning.devices import GIB, Device
from pilotlight.engine.planning.model_plan import ITEM_BYTES, PlannedModel, read_model
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace

# Reserves of a CUDA device, shared by all models of a host (not measured yet): the context and libraries of a host, those of its standby, and memory
# for recorded graphs.
CONTEXT_BYTES = 1 * GIB
STANDBY_BYTES = GIB // 2
GRAPH_BYTES = GIB // 4
STEP_BYTES = 1 * GIB  # activations if the model is not known
ROUNDING = 0.01  # share of the device's memory that is lost to the allocator's rounding
_LOGITS_COPIES = 3  # copies in fp32: the logits, masked or penalised rows, and sorted rows


class StepLimits(NamedTuple):
    """A step's largest size."""

    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    block_size: int = 16


class RankMemory(NamedTuple):
    """One rank's memory, in bytes."""

    weights: Mapping[Part, int]
    tables_bytes: int  # tables of rotary embeddings
    activations_bytes: int
    reserved_bytes: int  # contexts, libraries, graphs
    device_bytes: int
    layout: CacheLayout | None  # None if the model has no KV cache

    @property
    def weights_bytes(self) -> int:
        return sum(self.weights.values())

    @property
    def kv_bytes(self) -> int:
        """Return the bytes that are left for the KV cache; negative if bytes are missing."""
        return self.device_bytes - self.weights_bytes - self.tables_bytes - self.activations_bytes - self.reserved_bytes

    def kv_tokens(self, context_length: int, max_chunk: int) -> int:
        """Return how many tokens fit in sequences of `context_length`."""
        if self.layout is None or self.kv_bytes <= 0:
            return 0
        groups = CacheGroups(self.layout.block_size, max_chunk, self.layout.windows)
        return self.kv_bytes // self.layout.block_bytes * context_length // groups.most_blocks(context_length, 1)


class _ElementType(NamedTuple):
    """A replacement for a torch.dtype where only sizes are needed."""

    name: str
    itemsize: int


def block_layout(model: PlannedModel, place: RankPlace, block_size: int, context_length: int) -> CacheLayout | None:
    """Return the layout of the rank's KV blocks, or None without a KV cache.

    The layout is only valid for sizes, not for views of memory.
    """
    layers: Sequence[CachedLayer] = model.cached_layers(place)
    if model.kv_dtype == "fp8" and layers:
        layers = in_fp8(layers, cast(Any, _ElementType("float8_e4m3fn", 1)))
    dtype = cast(Any, _ElementType(model.dtype, ITEM_BYTES[model.dtype]))
    return CacheLayout(layers, block_size, dtype, context_length) if layers else None


def reserved_bytes(device_bytes: int, is_cpu: bool, has_standby: bool = True) -> int:
    """Return the bytes of a device that no model may use; 0 for a CPU, whose memory the system manages."""
    if is_cpu:
        return 0
    return CONTEXT_BYTES + has_standby * STANDBY_BYTES + GRAPH_BYTES + int(ROUNDING * device_bytes)


def left_for_kv(device_bytes: int, weights_bytes: int, activations_bytes: int, has_standby: bool = True) -> int:
    """Return the bytes of a CUDA device that weights, steps and reserves leave for the KV cache."""
    taken = weights_bytes + activations_bytes + reserved_bytes(device_bytes, False, has_standby)
    return max(0, device_bytes - taken)


def weights_room(model_bytes: Sequence[int], device_bytes: int) -> int:
    """Return the bytes that weights may take on a CUDA device whose KV cache takes the rest.

    The result is the sum of the models' sizes, but at most half of the device: models that need more take turns. It is half of the device if one of
    several sizes is not known yet (0). It is never less than the largest model.
    """
    whole = device_bytes // 2 if 0 in model_bytes and len(model_bytes) > 1 else sum(model_bytes)
    return max(min(whole, device_bytes // 2), max(model_bytes, default=0))


def beside_kv(device_bytes: int, kv_bytes: int) -> int:
    """Return the bytes of a CUDA device that a KV cache of a given size leaves for weights."""
    return max(0, device_bytes - kv_bytes - STEP_BYTES - reserved_bytes(device_bytes, is_cpu=False))


def weights_limit(host: HostConfig, device_bytes: int) -> int:
    """Return the bytes that models' weights may take on a host's CUDA device."""
    if host.model_bytes:
        return weights_room(host.model_bytes, device_bytes)
    return beside_kv(device_bytes, host.kv_bytes)


def planned_kv_bytes(directory: Path, dtype: str, host: HostConfig, device_bytes: int) -> int:
    """Return the size in bytes of a CUDA device's KV cache, for a host with configured `model_bytes`.

    It is the memory that all models, a step of the model in `directory`, and libraries leave.
    """
    limits = StepLimits(host.max_num_batched_tokens, host.max_num_seqs, host.block_size)
    places = Parallelism.of_host(host).stage_places
    try:
        model = read_model(directory, dtype)
        own = max(sum(model.weight_bytes(place, on_cpu=False).values()) for place in places)
        step = max(activations_bytes(model, place, limits) for place in places)
        step += model.table_bytes(model.config.context_length)
    except (CheckpointError, OSError, ValueError):  # the load will report the error
        own, step = 0, STEP_BYTES
    return left_for_kv(device_bytes, max(own, weights_room(host.model_bytes, device_bytes)), step)


def activations_bytes(model: PlannedModel, place: RankPlace, limits: StepLimits) -> int:
    """Return the most bytes that a step of the largest size holds besides weights and cache.

    That is the memory of encoded images, and the largest of: the hidden states, their sum and the widest part of a layer; hidden states and the
    logits of all sequences; the activations of an image's encoding.
    """
    item, hidden = model.item_bytes, model.config.hidden_size
    images = model.config.image_needs(item)
    tokens = limits.max_num_batched_tokens + images.step_tokens
    layers = model.stages(place.parallelism.pp)[place.stage]
    widest = max((_widest_part(model.layers[i], place) for i in layers), default=0)
    step = tokens * item * (3 * hidden + widest)
    step += model.config.step_bytes(tokens, place.parallelism.tp, item)
    if place.parallelism.copies > 1:
        # In the worst case each token is sent to as many ranks as it has experts, a sum returns from each, and the sums are added in fp32; or all
        # tokens come to one rank.
        top_k = max(int(shape.active) for _, shape in model.weights() if shape.experts)
        step += tokens * hidden * ((2 * min(place.parallelism.ep, top_k) + 1) * item + 4)
    if place.stage or model.pools:
        return step
    logits = _LOGITS_COPIES * 4 * limits.max_num_seqs * model.config.vocab_size
    return images.kept + max(step, images.encoding, tokens * item * 2 * hidden + logits)


def rank_memory(
    model: PlannedModel, place: RankPlace, device: Device, context_length: int, limits: StepLimits
) -> RankMemory:
    """Return the memory of one rank on its device. Raises CheckpointError if the split does not divide."""
    return RankMemory(
        model.weight_bytes(place, on_cpu=device.is_cpu),
        model.table_bytes(context_length),
        activations_bytes(model, place, limits),
        reserved_bytes(device.memory_bytes, device.is_cpu),
        device.memory_bytes,
        block_layout(model, place, limits.block_size, context_length),
    )


def all_ranks(
    model: PlannedModel, parallelism: Parallelism, device: Device, context_length: int, limits: StepLimits
) -> list[RankMemory]:
    """Return the memory of every rank, stage after stage. Raises CheckpointError."""
    config = model.config
    parallelism.require_counts(config.num_layers, config.num_heads, config.num_kv_heads, model.num_experts)
    parallelism.require_no_copies_of_states(config.cached_layers)
    places = [
        RankPlace(parallelism, rank, stage) for stage in range(parallelism.pp) for rank in range(parallelism.per_stage)
    ]
    return [rank_memory(model, place, device, context_length, limits) for place in places]


def _widest_part(shapes: Sequence[WeightShape], place: RankPlace) -> int:
    """Return how many numbers a token has in the widest part of a layer: projections' inputs and outputs.

    Attention holds queries both before and after their rotation; each expert of a token returns a row of the hidden size.
    """
    by_part: dict[Part, int] = {}
    for shape in shapes:
        if not shape.columns:
            continue
        _, rows, columns = place.part_of(shape)
        numbers = columns + (rows if shape.part == "experts" else 0) if shape.split == "columns" else rows
        by_part[shape.part] = by_part.get(shape.part, 0) + numbers * shape.active
    attention = by_part.pop("attention", 0)
    return max(attention, sum(by_part.values()))

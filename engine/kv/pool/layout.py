"""The layout of a KV cache block: *segments* per layer, and *groups* of layers with one block table.

A block contains the keys and values (or other segments) of `block_size` tokens in the layers of one group, contiguously, so that one copy moves it
between tiers and machines. A segment is stored head by head, [num_heads, block_size, head_dim], so that a rank's heads are few pieces of a block.

A layer may keep a *state* instead of data per token: a block then contains the state after its last computed token. The next token reads that state
and writes its own, into the same block or, after a block's last token, into the next block. So a full block contains a snapshot, which nothing
changes, and a token needs only the block of the previous token: a window of two tokens. Tables, names, prefix hits, tiers and peers treat a state as
such a window.

Blocks of all groups have the same size and come from one pool. This module computes bytes and shapes; it is independent of tokens.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.kv.pool.groups import Windows
from pilotlight.engine.weights.shard import Shard

if TYPE_CHECKING:
    import torch

# Increment this when the meaning of a block's bytes changes, so that tiers do not return old blocks.
_VERSION = 2
_ALIGNMENT = 16  # in bytes, of each segment: a kernel would be compiled again for unaligned arguments
# Fewer groups are used if the memory of a full context then grows at most by this factor, because every group is one more table to fill and copy in
# each step.
_WASTE = 1.02
STATE_WINDOW = 2  # in tokens: a token reads the state after the previous token
# Limit of the bytes of snapshots (every full block of a state is one), as a multiple of the bytes of keys and values of the same tokens. To stay
# below it, blocks are made longer, but at most so long that a prefix hit leaves little of a long prompt to compute.
_SNAPSHOT_SHARE = 3
_LONGEST_BLOCK = 1024  # in tokens


class CacheSegment(NamedTuple):
    """A layer's cached vectors of one kind, such as keys: `num_heads` per token, of `head_dim` numbers."""

    name: str
    num_heads: int
    head_dim: int
    dtype: "torch.dtype | None" = None  # None for the cache's dtype
    scale: float = 1.0  # with FP8, the factor by which stored numbers are multiplied
    is_state: bool = False  # True for one vector per head and block instead of per token
    is_wide: bool = False  # always fp32


class CachedLayer(NamedTuple):
    segments: tuple[CacheSegment, ...]  # none if the layer caches nothing
    window: int | None = None  # number of tokens that a query sees, itself included; None if unlimited

    @classmethod
    def of_state(cls, *segments: CacheSegment) -> "CachedLayer":
        return cls(tuple([segment._replace(is_state=True) for segment in segments]), STATE_WINDOW)

    @property
    def is_state(self) -> bool:
        return bool(self.segments) and self.segments[0].is_state

    def part_of(self, shard: Shard) -> "CachedLayer":
        """Return one rank's part of the layer: its heads of each segment, at least one."""
        parts = tuple(
            [segment._replace(num_heads=max(1, segment.num_heads // shard.size)) for segment in self.segments]
        )
        return self._replace(segments=parts)


def in_fp8(
    layers: Sequence[CachedLayer],
    dtype: "torch.dtype",
    scales: Mapping[int, tuple[float, float]] = MappingProxyType({}),
) -> tuple[CachedLayer, ...]:
    """Return the layers with keys and values, or latent vectors, in FP8; states stay unchanged.

    `dtype`: FP8. Keys of an index get a scale each, in a further segment. `scales`: (of keys, of values) by layer, 1 by default; latent vectors have
    that of keys. Raises CheckpointError for layers that cache other segments.
    """
    found = []
    for i, layer in enumerate(layers):
        if layer.is_state or not layer.segments:
            found.append(layer)
            continue
        names = tuple(segment.name for segment in layer.segments)
        if names not in (("k", "v"), ("latent",), ("latent", "index")):
            raise CheckpointError(
                f"layer {i} caches {', '.join(names)}, which FP8 does not support: leave kv_dtype at auto"
            )
        scale, second = scales.get(i, (1.0, 1.0))
        narrow = [
            segment._replace(dtype=dtype, scale=factor)
            for segment, factor in zip(layer.segments, (scale, second if names == ("k", "v") else 1.0), strict=False)
        ]
        if "index" in names:
            narrow.append(CacheSegment("index scale", 1, 1, is_wide=True))
        found.append(layer._replace(segments=tuple(narrow)))
    return tuple(found)


class LayerGroup(NamedTuple):
    layers: tuple[int, ...]
    window: int | None


class LayerCache(NamedTuple):
    """One layer's view of the blocks."""

    segments: "tuple[torch.Tensor, ...]"  # each [num_blocks, block_size, num_heads, head_dim], stored head by head; a state: [num_blocks, 1, ...]
    group: int  # number of the group whose block table locates the layer's blocks
    scales: "torch.Tensor | None" = None  # fp32, one for each segment in FP8
    block_size: int = 0  # tokens
    is_state: bool = False


class CacheLayout:
    def __init__(
        self,
        layers: Sequence[CachedLayer],
        block_size: int,
        dtype: "torch.dtype",
        context_length: int = 1 << 17,
        stages: Sequence[Collection[int]] = (),
        stage: int = 0,
    ) -> None:
        """Choose groups and block size.

        `block_size`: tokens; the layout may choose more if there are states. `dtype`: for segments without a dtype. `context_length`: the length for
        which memory is minimised. `stages`: the indices of each pipeline stage's layers; `stage`: this rank's stage. Blocks and groups are the same
        on all stages.
        """
        self.layers = tuple(layers)
        self.dtype = dtype
        self.block_size = self._length(block_size)
        stages = self._stages = tuple(stages) or (range(len(self.layers)),)
        groups = _groups(self.layers, [self._layer_bytes(layer) for layer in layers], context_length, stages)
        self.block_bytes = max(self._bytes_of_layers(group.layers, of) for group in groups for of in stages)
        self._own = stages[stage]
        self.groups = tuple(group._replace(layers=tuple(i for i in group.layers if i in self._own)) for group in groups)

    @property
    def windows(self) -> Windows:
        return tuple([group.window for group in self.groups])

    @property
    def has_states(self) -> bool:
        return any(layer.is_state for layer in self.layers)

    @property
    def identity(self) -> str:
        """A string that contains everything that determines the meaning of a block's bytes."""
        groups = [(group.window, [self.layers[i].segments for i in group.layers]) for group in self.groups]
        cut = f":{[len(stage) for stage in self._stages]}" if len(self._stages) > 1 else ""
        return f"{_VERSION}:{self.block_size}:{self.dtype}:{groups}{cut}"

    @property
    def description(self) -> str:
        """A sentence that explains the size of a block."""
        group = max(self.groups, key=lambda group: self._bytes_of_layers(group.layers, self._own))
        segments = self.layers[group.layers[0]].segments if group.layers else ()
        parts = " + ".join(
            f"{one.name} {one.num_heads} x {one.head_dim} x {self._item_bytes(one)} bytes" for one in segments
        )
        return f"a block of {self.block_size} tokens takes {self.block_bytes} bytes ({len(group.layers)} layers of {parts})"

    def blocks_in(self, memory: "torch.Tensor") -> "torch.Tensor":
        """View memory, [bytes] uint8, as blocks: [num_blocks, block_bytes]."""
        return memory.view(-1, self.block_bytes)

    def new_blocks(self, num_blocks: int, device: "torch.device") -> "torch.Tensor":
        """Return new zeroed blocks: [num_blocks, block_bytes] uint8."""
        import torch  # imported here because memory plans do without torch

        return torch.zeros(num_blocks, self.block_bytes, dtype=torch.uint8, device=device)

    def views(self, blocks: "torch.Tensor") -> list[LayerCache]:
        """Return each layer's view of blocks, [num_blocks, block_bytes] uint8.

        The view of another stage's layer has no segments.
        """
        views = dict.fromkeys(range(len(self.layers)), LayerCache((), 0))
        for number, group in enumerate(self.groups):
            placed = self.placed(group.layers)
            for i in group.layers:
                segments = [
                    self._view(segment, blocks, start)
                    for start, segment in islice(placed, len(self.layers[i].segments))
                ]
                views[i] = LayerCache(
                    tuple(segments),
                    number,
                    _scales_of(self.layers[i], blocks),
                    self.block_size,
                    self.layers[i].is_state,
                )
        return [views[i] for i in range(len(self.layers))]

    def placed(self, layers: Sequence[int]) -> Iterator[tuple[int, CacheSegment]]:
        """Yield the segments of these layers with their offsets in a block."""
        start = 0
        for i in layers:
            for segment in self.layers[i].segments:
                yield start, segment
                start += self._bytes_of(segment)

    def head_bytes(self, segment: CacheSegment, block_size: int | None = None) -> int:
        """Return the number of bytes of one head's vectors in a block."""
        rows = 1 if segment.is_state else block_size or self.block_size
        return rows * segment.head_dim * self._item_bytes(segment)

    def _length(self, block_size: int) -> int:
        """Return how many tokens a block holds: more than `block_size` if snapshots would be too large."""
        state = sum(self._layer_bytes(layer, 1) for layer in self.layers if layer.is_state)
        token = sum(self._layer_bytes(layer, block_size) for layer in self.layers if not layer.is_state) / block_size
        while block_size < _LONGEST_BLOCK and state > _SNAPSHOT_SHARE * token * block_size:
            block_size *= 2
        return block_size

    def _view(self, segment: CacheSegment, blocks: "torch.Tensor", start: int) -> "torch.Tensor":
        """Return a view of the segment that starts at byte `start` of each block."""
        import torch

        rows = 1 if segment.is_state else self.block_size
        numbers = blocks.view(torch.float32 if segment.is_wide else segment.dtype or self.dtype)
        shape = (len(blocks), rows, segment.num_heads, segment.head_dim)
        # The strides are explicit, because torch would choose any stride between blocks if there is only one.
        strides = (numbers.shape[1], segment.head_dim, rows * segment.head_dim, 1)
        return numbers.as_strided(shape, strides, numbers.storage_offset() + start // numbers.itemsize)

    def _item_bytes(self, segment: CacheSegment) -> int:
        return 4 if segment.is_wide else (segment.dtype or self.dtype).itemsize

    def _bytes_of(self, segment: CacheSegment, block_size: int | None = None) -> int:
        size = segment.num_heads * self.head_bytes(segment, block_size)
        return -(-size // _ALIGNMENT) * _ALIGNMENT

    def _bytes_of_layers(self, layers: Sequence[int], stage: Collection[int]) -> int:
        return sum(self._layer_bytes(self.layers[i]) for i in layers if i in stage)

    def _layer_bytes(self, layer: CachedLayer, block_size: int | None = None) -> int:
        return sum([self._bytes_of(segment, block_size) for segment in layer.segments])


def keys_and_values(num_heads: int, head_dim: int) -> tuple[CacheSegment, ...]:
    """Return the segments of one layer of grouped-query attention."""
    return CacheSegment("k", num_heads, head_dim), CacheSegment("v", num_heads, head_dim)


def _scales_of(layer: CachedLayer, blocks: "torch.Tensor") -> "torch.Tensor | None":
    import torch

    scales = [segment.scale for segment in layer.segments if segment.dtype is torch.float8_e4m3fn]
    return blocks.new_tensor(scales, dtype=torch.float32) if scales else None


def _groups(
    layers: Sequence[CachedLayer], sizes: Sequence[int], context_length: int, stages: Sequence[Collection[int]]
) -> tuple[LayerGroup, ...]:
    """Group layers that have the same window.

    Chooses the largest block, in bytes, whose memory for a full context, including all snapshots of states, is close to the minimum. Layers of the
    stages alternate, so that every stage has an equal part of each group.
    """
    kinds: dict[int | None, list[int]] = defaultdict(list)
    in_turns = [i for at_once in zip_longest(*stages) for i in at_once if i is not None]
    for i in in_turns:
        layer = layers[i]
        if not layer.segments:
            continue
        kinds[layer.window if layer.window is not None and layer.window < context_length else None].append(i)
    if len(kinds) < 2:
        return tuple(LayerGroup(tuple(kind), window) for window, kind in kinds.items()) or (LayerGroup((), None),)
    windows = sorted(kinds, key=lambda window: window or 0)  # full attention comes first
    candidates = {sum(sizes[i] for i in kind[:length]) for kind in kinds.values() for length in range(1, len(kind) + 1)}
    costs = {}
    for block_bytes in candidates:
        cuts = [_cut(kinds[window], sizes, block_bytes) for window in windows]
        if all(cuts):
            tokens = sum(
                len(cut) * (context_length if window is None or layers[cut[0][0]].is_state else window)
                for window, cut in zip(windows, cuts, strict=True)
            )
            costs[block_bytes] = block_bytes * tokens
    block_bytes = max(size for size, cost in costs.items() if cost <= _WASTE * min(costs.values()))
    return tuple(LayerGroup(part, window) for window in windows for part in _cut(kinds[window], sizes, block_bytes))


def _cut(layers: Sequence[int], sizes: Sequence[int], block_bytes: int) -> list[tuple[int, ...]]:
    """Cut layers into groups that fit into a block; return no groups if a layer does not fit."""
    groups: list[list[int]] = []
    room = 0
    for i in layers:
        if sizes[i] > block_bytes:
            return []
        if sizes[i] > room:
            groups.append([])
            room = block_bytes
        groups[-1].append(i)
        room -= sizes[i]
    return [tuple(group) for group in groups]

"""A host's KV memory, from which models borrow, and the other ranks of its group."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.device.device import choose_device, make_arena, memory_of
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.kv.lending.slab_allocator import SlabAllocator
from pilotlight.engine.parallel.one_rank import OneRank
from pilotlight.engine.planning.memory_plan import planned_kv_bytes

if TYPE_CHECKING:
    from pilotlight.engine.parallel.rank_links import RankLinks
    from pilotlight.engine.parallel.ranks import RankGroup


class KvMemory(NamedTuple):
    """The arena, its division into slabs, and (on the first of several ranks) the other ranks."""

    arena: Arena
    slabs: SlabAllocator
    group: "RankGroup | OneRank" = OneRank()

    @property
    def links(self) -> "RankLinks | None":
        return self.group.links

    def close(self) -> None:
        """End the other ranks."""
        self.group.close()


def make_kv_memory(
    config: HostConfig,
    on_lost: Callable[[str], None] = lambda why: None,
    first: ModelSpec | None = None,
    on_wait: Callable[[str], None] = lambda why: None,
) -> KvMemory:
    """Allocate the KV memory of a host, and start the other ranks of its group with equal memory.

    `on_lost`: called from a thread with the reason when a rank has ended. `first`: the model to load first; on a GPU the KV cache may get the memory
    that models leave. `on_wait`: called with a description of what the ranks wait for. Raises CheckpointError.
    """
    config = _sized(config, first)
    arena = make_arena(config, config.device)
    if len(config.group) < 2:
        return KvMemory(arena, SlabAllocator(arena.num_slabs, arena.slab_bytes, arena.clear))
    from pilotlight.engine.parallel.ranks import RankGroup

    group = RankGroup(config, arena.device, on_lost, on_wait)

    def clear(slab: int) -> None:
        group.clear(slab)
        arena.clear(slab)

    return KvMemory(arena, SlabAllocator(arena.num_slabs, arena.slab_bytes, clear), group)


def _sized(config: HostConfig, first: ModelSpec | None) -> HostConfig:
    """Return the configuration with the size of the KV cache, which is the same on all ranks of a group."""
    device = choose_device(config.device)
    if not config.model_bytes or first is None or device.type != "cuda":
        return config
    return replace(config, kv_bytes=planned_kv_bytes(Path(first.path), first.dtype, config, memory_of(device)))

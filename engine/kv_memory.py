"""A host's KV memory: one allocation on its device, which models borrow from; on the first of several ranks, the other ranks as well."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.device_memory import allocate_patiently
from engine.errors import CheckpointError
from engine.kv.arena import Arena
from engine.kv.slab_allocator import SlabAllocator
from engine.parallel.one_rank import OneRank
from engine.planning.memory import planned_kv_bytes
from engine.protocol import HostConfig, ModelSpec
from engine.struct import replace
from kernels.cpu import library as cpu_kernels
from kernels.cpu import pages

if TYPE_CHECKING:
    from engine.parallel.communicator import RankLinks
    from engine.parallel.ranks import RankGroup


class KvMemory(NamedTuple):
    """One allocation, and which model has which part of it; on the first of several ranks, the others as well."""

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
    """Return the memory of a host, and the ranks of its group, who have as much each. `on_lost`: called from a thread when one of them has ended.
    `first`: the model to be loaded first, where the KV cache is what models leave of a GPU. `on_wait`: told what room for ranks is waited for. Raises
    CheckpointError."""
    config = _sized(config, first)
    arena = make_arena(config, config.device)
    if len(config.group) < 2:
        return KvMemory(arena, SlabAllocator(arena.num_slabs, arena.slab_bytes, arena.clear))
    from engine.parallel.ranks import RankGroup

    group = RankGroup(config, arena.device, on_lost, on_wait)

    def clear(slab: int) -> None:
        group.clear(slab)
        arena.clear(slab)

    return KvMemory(arena, SlabAllocator(arena.num_slabs, arena.slab_bytes, clear), group)


def _sized(config: HostConfig, first: ModelSpec | None) -> HostConfig:
    """Return the configuration with the size of the KV cache, of which the others of a group have as much."""
    device = choose_device(config.device)
    if not config.model_bytes or first is None or device.type != "cuda":
        return config
    return replace(config, kv_bytes=planned_kv_bytes(Path(first.path), first.dtype, config, _memory_of(device)))


def make_arena(config: HostConfig, device_name: str) -> Arena:
    """Allocate one rank's KV memory. Raises CheckpointError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif len(config.group) > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // len(config.near_ranks)))
    device = choose_device(device_name)
    if device.type == "cpu":
        cpu_kernels.start()
    try:
        arena = allocate_patiently(lambda: Arena(config.kv_bytes, device), lambda: torch.cuda.mem_get_info(device)[0])
    except (OSError, RuntimeError):  # the system's refusal, or torch's of a device
        there = _memory_of(device) / 2**30
        message = (
            f"a KV cache of {config.kv_bytes / 2**30:g} GiB does not fit into the memory of {device}, {there:.1f} GiB"
        )
        raise CheckpointError(f"{message}; lower kv_gib (of `pilotlight serve`: --kv-gib)") from None
    pages.prefer_huge(arena.span(0, arena.total_bytes))
    return arena


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_device(name: str) -> torch.device:
    """Return the device of that name: "auto" is the first CUDA device that works here, else the CPU. Raises CheckpointError for a device there is
    not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"device {name!r} cannot be used here: {reason}; say auto, cpu, cuda or cuda:N") from None
    return device

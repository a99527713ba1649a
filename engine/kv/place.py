"""The place of a model's KV blocks: its own part of the arena, or one that models lend each other."""

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.kv.lending.lease import Lease, Reservation
from pilotlight.engine.kv.lending.slab_allocator import NoSlabsError, SlabAllocator
from pilotlight.engine.kv.pool.layout import CacheLayout


def find_place(
    spec: ModelSpec, layout: CacheLayout, slabs: SlabAllocator, arena_bytes: int, copies: int = 1
) -> Lease | Reservation:
    """Return the model's place in the arena. Raises CheckpointError if there is no room.

    `arena_bytes`: the total, for the error. `copies`: ranks that each have such a place, for separate sequences.
    """
    try:
        if spec.kv_tokens is None:
            return slabs.open(spec.name, layout.block_bytes, copies)
        wanted = num_reserved_blocks(spec, layout) * layout.block_bytes
        available = slabs.largest_run * slabs.slab_bytes
        if not 0 < wanted <= available:
            raise CheckpointError(
                f"{spec.name} asks for {spec.kv_tokens} tokens of KV cache, {wanted} bytes; "
                f"the arena can give {available} in one piece, and {layout.description}: lower kv_tokens or raise kv_gib"
            )
        return slabs.reserve(spec.name, -(-wanted // slabs.slab_bytes))
    except NoSlabsError as error:
        raise CheckpointError(
            f"the KV arena of {arena_bytes} bytes has no room for {spec.name}: {error}; {layout.description}; "
            "give the host more KV memory (kv_gib), lower block_size, or change the models' own shares (kv_tokens)"
        ) from error


def num_reserved_blocks(spec: ModelSpec, layout: CacheLayout) -> int:
    """Return the blocks for `kv_tokens`, on each rank, of one sequence or of several short ones."""
    return len(layout.groups) * -(-(spec.kv_tokens or 0) // layout.block_size)

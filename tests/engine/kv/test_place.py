"""The memory of a model's KV blocks: slabs are reserved for a model with a fixed size, and other models borrow slabs."""

import pytest
import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.kv.lending.lease import Lease, Reservation
from pilotlight.engine.kv.lending.slab_allocator import SlabAllocator, find_place
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheLayout, CacheSegment

LAYOUT = CacheLayout([CachedLayer((CacheSegment("keys", 1, 8),))], 16, torch.float32)
SLAB = 4 * LAYOUT.block_bytes


def place(slabs: SlabAllocator, kv_tokens: int | None) -> Lease | Reservation:
    return find_place(ModelSpec("m", "/m", kv_tokens=kv_tokens), LAYOUT, slabs, slabs.num_slabs * SLAB)


@pytest.mark.parametrize(("kv_tokens", "num_slabs"), [(1, 1), (4 * 16, 1), (4 * 16 + 1, 2), (3 * 4 * 16, 3)])
def test_what_was_promised_is_its_own(kv_tokens: int, num_slabs: int) -> None:
    slabs = SlabAllocator(3, SLAB, lambda slab: None)
    found = place(slabs, kv_tokens)
    assert isinstance(found, Reservation)
    assert len(found.slabs) == num_slabs


@pytest.mark.parametrize("kv_tokens", [0, 3 * 4 * 16 + 1])
def test_nothing_and_more_than_there_is_cannot_be_promised(kv_tokens: int) -> None:
    with pytest.raises(CheckpointError, match=f"asks for {kv_tokens} tokens"):
        place(SlabAllocator(3, SLAB, lambda slab: None), kv_tokens)


def test_others_borrow_what_is_left_and_where_nothing_is_left_are_refused() -> None:
    slabs = SlabAllocator(3, SLAB, lambda slab: None)
    assert isinstance(place(slabs, 2 * 4 * 16), Reservation)
    assert isinstance(place(slabs, None), Lease)
    with pytest.raises(CheckpointError):
        place(slabs, 1)  # the last slab is lent
    full = SlabAllocator(1, SLAB, lambda slab: None)
    place(full, 1)
    with pytest.raises(CheckpointError, match="no slab is left to borrow"):
        place(full, None)

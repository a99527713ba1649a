import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.arena import ALIGNMENT, Arena, ArenaFullError, Slab

CPU = torch.device("cpu")
SIZE = 10 * ALIGNMENT + 42


def test_what_is_borrowed_holds_zeros_even_after_another_borrower() -> None:
    arena = Arena(100_000, CPU)
    first, second = arena.borrow(50_000), arena.borrow(1000)
    first.memory.fill_(255)
    second.memory.fill_(255)
    arena.give_back(first)
    assert int(arena.borrow(40_000).memory.max()) == 0
    assert int(second.memory.min()) == 255, "a neighbour's memory must stay"
    arena.give_back(second)
    assert int(arena.borrow(50_000).memory.max()) == 0


def test_a_request_beyond_the_largest_gap_is_refused_with_both_numbers() -> None:
    arena = Arena(2 * ALIGNMENT, CPU)
    arena.borrow(1)
    with pytest.raises(ArenaFullError, match=f"{ALIGNMENT + 1} bytes wanted, the largest gap has {ALIGNMENT}"):
        arena.borrow(ALIGNMENT + 1)


def test_giving_back_twice_is_noticed() -> None:
    arena = Arena(2 * ALIGNMENT, CPU)
    slab = arena.borrow(512)
    arena.give_back(slab)
    with pytest.raises(AssertionError):
        arena.give_back(slab)


@given(st.lists(st.one_of(st.integers(1, 4 * ALIGNMENT), st.integers(-8, -1)), max_size=40))
@settings(deadline=None)
def test_slabs_never_overlap_and_gaps_merge_again(actions: list[int]) -> None:
    arena = Arena(SIZE, CPU)
    slabs: list[Slab] = []
    for action in actions:
        if action > 0:
            try:
                slabs.append(arena.borrow(action))
            except ArenaFullError:
                assert arena.largest_gap_bytes < action
        elif slabs:
            arena.give_back(slabs.pop(action % len(slabs)))
        spans = sorted((slab.start, slab.start + slab.memory.numel()) for slab in slabs)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert all(start % ALIGNMENT == 0 for start, _ in spans)
    for slab in slabs:
        arena.give_back(slab)
    assert arena.largest_gap_bytes == arena.free_bytes == SIZE

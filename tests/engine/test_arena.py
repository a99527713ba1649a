import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.arena import Arena, ArenaFullError, Slab

CPU = torch.device("cpu")


def test_what_is_borrowed_holds_zeros_even_after_another_borrower() -> None:
    arena = Arena(1000, CPU)
    slab = arena.borrow(700)
    slab.memory.fill_(255)
    arena.give_back(slab)
    assert int(arena.borrow(900).memory.max()) == 0


def test_a_request_beyond_the_largest_gap_is_refused_with_both_numbers() -> None:
    arena = Arena(1024, CPU)
    arena.borrow(512)
    with pytest.raises(ArenaFullError, match="600 bytes wanted, the largest gap has 512"):
        arena.borrow(600)


def test_giving_back_twice_is_noticed() -> None:
    arena = Arena(1024, CPU)
    slab = arena.borrow(512)
    arena.give_back(slab)
    with pytest.raises(AssertionError):
        arena.give_back(slab)


@given(st.lists(st.one_of(st.integers(1, 3000), st.integers(-8, -1)), max_size=40))
@settings(deadline=None)
def test_slabs_never_overlap_and_gaps_merge_again(actions: list[int]) -> None:
    arena = Arena(8000, CPU)
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
        assert all(start % 256 == 0 for start, _ in spans)
    for slab in slabs:
        arena.give_back(slab)
    assert arena.largest_gap_bytes == arena.free_bytes == 8000

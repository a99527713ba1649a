"""The placement of experts on ranks: as even as their loads allow, with copies of the busiest, and always at least one of each."""

import random

import pytest

from pilotlight.engine.parallel.placement import ExpertPlacement


def zipf(num_experts: int, seed: int) -> list[int]:
    loads = [10_000 // (i + 1) for i in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


def test_before_anything_is_known_ranks_have_runs_and_copies_of_the_next_experts() -> None:
    assert ExpertPlacement.first(6, 2, 0).slots == ((0, 1, 2), (3, 4, 5))
    assert ExpertPlacement.first(6, 2, 1).slots == ((0, 1, 2, 3), (3, 4, 5, 0))


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "spare"), [(8, 2, 0), (8, 2, 1), (16, 4, 2), (64, 8, 4), (6, 2, 3)]
)
def test_every_expert_has_a_rank_and_no_rank_an_expert_twice(num_experts: int, num_ranks: int, spare: int) -> None:
    placement = ExpertPlacement.first(num_experts, num_ranks, spare)
    for seed in range(20):
        loads = zipf(num_experts, seed) if seed else [0] * num_experts
        before, placement = placement, placement.balanced(loads)
        assert placement.num_experts == num_experts
        for old, new in zip(before.slots, placement.slots, strict=True):
            assert len(set(new)) == len(old) == len(new)
            assert all(new.index(expert) == old.index(expert) for expert in set(old) & set(new)), (
                "an expert that stays on a rank keeps its slot"
            )


def test_copies_of_the_busiest_expert_make_the_slowest_rank_faster() -> None:
    loads = [1000, 1, 1, 1, 1, 1, 1, 1]
    whole = ExpertPlacement.first(8, 2, 0)
    copied = ExpertPlacement.first(8, 2, 1).balanced(loads)
    assert whole.balanced(loads).slowest(loads) >= 1000, "without copies, one rank has the whole load of the expert"
    assert copied.slowest(loads) <= 505
    assert copied.ranks_of(0) == [0, 1]


def test_an_expert_that_every_rank_has_leaves_further_copies_to_the_next_one() -> None:
    placement = ExpertPlacement.first(4, 2, 1).balanced([1000, 10, 1, 1])
    assert (placement.ranks_of(0), placement.ranks_of(1)) == ([0, 1], [0, 1])


def test_sixty_four_experts_of_skewed_loads_come_within_a_tenth_of_even() -> None:
    loads = zipf(64, seed=1)
    placement = ExpertPlacement.first(64, 8, 2)
    even = sum(loads) / 8
    assert placement.slowest(loads) > 1.5 * even
    assert placement.balanced(loads).slowest(loads) < 1.1 * even

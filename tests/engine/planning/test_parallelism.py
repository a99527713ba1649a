"""The degrees of parallelism that a model supports, and the errors for others."""

from itertools import combinations, pairwise
from random import Random

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace, balanced_stages

LAYERS, HEADS, KV_HEADS, EXPERTS = 8, 4, 2, 6


@pytest.mark.parametrize(
    "degrees",
    [{}, {"tp": 4}, {"pp": 8}, {"tp": 2, "ep": 2}, {"ep": 3}, {"tp": 2, "pp": 3}, {"tp": 2, "ep": 2, "spare": 3}],
)
def test_degrees_that_divide_a_model_are_taken(degrees: dict[str, int]) -> None:
    Parallelism(**degrees).require_counts(LAYERS, HEADS, KV_HEADS, EXPERTS)


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"pp": 0}, "pp is 0; it must be at least 1"),
        ({"pp": 9}, "pp is 9, but the model has 8 layers: use at most as many stages"),
        ({"ep": 4}, "ep is 4, and the model has 6 experts; ep may be 2, 3, 6"),
        ({"tp": 3}, "tp is 3, and the model has 4 heads and 2 key-value heads; tp may be 1, 2, 4"),
        ({"tp": 2, "ep": 3}, "tp 2 and ep 3 do not divide one another; make one a multiple"),
        (
            {"tp": 2, "ep": 2, "spare": 4},
            "redundant_experts is 8, but a rank has an expert only once: 6 experts on 2 ranks may have at most 6 more copies",
        ),
    ],
)
def test_other_degrees_are_refused_in_a_sentence_that_names_those_that_fit(
    degrees: dict[str, int], message: str
) -> None:
    with pytest.raises(CheckpointError) as refused:
        Parallelism(**degrees).require_counts(LAYERS, HEADS, KV_HEADS, EXPERTS)
    assert str(refused.value) == message


def test_copies_of_experts_are_as_many_on_every_rank() -> None:
    assert Parallelism.of_group(4, 2, True, 6) == Parallelism(2, 2, 2, spare=3)
    with pytest.raises(
        CheckpointError, match="redundant_experts is 5, and 2 ranks share a layer's experts; make it a multiple"
    ):
        Parallelism.of_group(4, 2, True, 5)


def test_copies_of_the_attention_are_on_as_many_ranks_of_a_stage_each() -> None:
    assert Parallelism.of_group(8, 2, True, copies=2) == Parallelism(2, 2, 4)
    assert Parallelism.of_group(4, 2, True, copies=2) == Parallelism(1, 2, 2)
    assert Parallelism.of_group(4, 1, True, 4, copies=4) == Parallelism(1, 1, 4, spare=1)
    assert str(Parallelism(1, 2, 2)) == "tp 1, pp 2, ep 2, dp 2"
    for size, is_by_experts in ((3, True), (2, False)):
        with pytest.raises(
            CheckpointError,
            match=f"a stage has {size} ranks, .* make it a divisor of {size}, with expert_parallel, or 1",
        ):
            Parallelism.of_group(size, 1, is_by_experts, copies=2)
    with pytest.raises(
        CheckpointError, match="no experts to divide: copies would share nothing, so run a host for each device"
    ):
        Parallelism(ep=2).require_counts(LAYERS, HEADS, KV_HEADS, 0)


def test_a_rank_has_the_bytes_of_its_copies() -> None:
    shape = WeightShape("experts", "up", 8, 4, "rows", experts=EXPERTS, active=2)
    assert RankPlace(Parallelism(2, 1, 2, spare=1)).part_of(shape) == (EXPERTS // 2 + 1, 8, 4)


@pytest.mark.parametrize("seed", range(40))
def test_the_dearest_stage_costs_as_little_as_any_cut_allows(seed: int) -> None:
    draw = Random(seed)
    costs = tuple(float(draw.randrange(1, 9)) for _ in range(draw.randrange(3, 9)))
    first, num_stages = float(draw.randrange(6)), draw.randrange(1, min(4, len(costs)) + 1)

    def dearest(cuts: "tuple[int, ...]") -> float:
        spans = list(pairwise((0, *cuts, len(costs))))
        return max(sum(costs[begin:end]) + (first if begin == 0 else 0.0) for begin, end in spans)

    stages = balanced_stages(costs, first, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(len(costs)))
    assert len(stages) == num_stages
    assert all(stages)
    best = min(map(dearest, combinations(range(1, len(costs)), num_stages - 1)))
    assert dearest(tuple(stage.start for stage in stages[1:])) == best


def test_a_rank_has_its_part_of_a_matrix_and_a_sum_is_the_first_ones() -> None:
    def parts(shape: WeightShape, degrees: Parallelism) -> list[tuple[int, int, int]]:
        return [RankPlace(degrees, rank).part_of(shape) for rank in range(degrees.per_stage)]

    assert parts(WeightShape("attention", "q", 8, 6, "rows"), Parallelism(tp=2)) == [(1, 4, 6)] * 2
    assert parts(WeightShape("attention", "o", 8, 6, "columns"), Parallelism(tp=2)) == [(1, 8, 3)] * 2
    assert parts(WeightShape("norm", "n", 8, 0), Parallelism(tp=2)) == [(1, 8, 0)] * 2
    bias = WeightShape("attention", "o.bias", 8, is_sum=True)
    assert parts(bias, Parallelism(tp=2)) == [(1, 8, 0), (0, 0, 0)]
    experts = WeightShape("experts", "up", 8, 4, "rows", experts=EXPERTS, active=2)
    assert parts(experts, Parallelism(tp=4, ep=2)) == [(3, 4, 4)] * 4, "two ranks share three experts"
    assert parts(experts, Parallelism(tp=2)) == [(6, 4, 4)] * 2
    assert parts(experts, Parallelism(ep=3)) == [(2, 8, 4)] * 3


def test_degrees_say_how_many_ranks_they_are_of() -> None:
    degrees = Parallelism(tp=2, pp=3, ep=4)
    assert (degrees.per_stage, degrees.size, degrees.copies) == (4, 12, 2)
    places = [RankPlace(degrees, rank) for rank in range(4)]
    assert [(place.copy, place.shard.rank) for place in places] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [place.stage for place in degrees.stage_places] == [0, 1, 2]
    assert Parallelism.of_group(1, 3, True, 5, 7) == Parallelism()
    assert Parallelism.of_group(4, 2, False) == Parallelism(2, 2)

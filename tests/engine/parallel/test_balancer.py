"""The balancer of experts: every rank takes part in every check of the loads, and no expert moves while a rank's weights are mapped from a file."""

from typing import Any, cast

import pytest
import torch

from pilotlight.engine.layers.moe import Experts, SparseMLP
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.parallel.balancer import ExpertBalancer, experts_of
from pilotlight.engine.parallel.placement import ExpertPlacement
from pilotlight.engine.weights.shard import Shard
from pilotlight.kernels.matrices.plain import PlainWeight

LOADS = [90, 80, 1, 1]


class OtherRank:
    """A fake second rank that receives the counts and messages of the first."""

    is_first = False
    rank, size, copies = 1, 2, 1
    shard = Shard(1, 2)

    def __init__(self, ready: int, loads: list[int] = LOADS) -> None:
        self.looks = 0
        self._ready = ready
        self._loads = loads

    def from_rank(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.int64:
            self.looks += 1
            return torch.tensor([self._loads])
        return x

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return x + self._ready


def model_of(placement: ExpertPlacement) -> Decoder:
    gate_up, down = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    experts = Experts(PlainWeight(gate_up), PlainWeight(down), placement=placement, rank=1)
    part: Any = None
    sparse = SparseMLP(part, experts)
    layer = DecoderLayer(attention_norm=part, attention=part, feed_forward_norm=part, feed_forward=sparse)
    return Decoder(None, [layer], None, None, [])


@pytest.mark.parametrize("is_first_ready", [True, False])
def test_a_model_that_has_just_taken_anothers_place_looks_with_the_others(is_first_ready: bool) -> None:
    ranks = OtherRank(int(is_first_ready))
    model = model_of(ExpertPlacement.first(4, 2, 0))
    balancer = ExpertBalancer(cast("Any", ranks))
    balancer.before_step(model, 5000)
    assert ranks.looks == 1, "a new model must take part, as the other ranks wait for it"
    balancer.before_step(model, 1)
    assert balancer.moved == is_first_ready
    balancer.before_step(model, 1)
    assert ranks.looks == 1, "the count of steps begins again"


def test_experts_stay_where_they_are_for_a_hundredth() -> None:
    loads = [50, 52, 51, 49]
    first = ExpertPlacement.first(4, 2, 0)
    assert first.slowest(loads) > first.balanced(loads).slowest(loads) > 0.95 * first.slowest(loads)
    model = model_of(first)
    balancer = ExpertBalancer(cast("Any", OtherRank(1, loads)))
    for _ in range(3):
        balancer.before_step(model, 5000)
    assert balancer.moved == 0


def test_older_tokens_count_less_at_each_look() -> None:
    model = model_of(ExpertPlacement.first(4, 2, 0))
    (experts,) = experts_of(model)
    experts.seen = torch.tensor([80, 4, 0, 0])
    ExpertBalancer(cast("Any", OtherRank(0))).before_step(model, 5000)
    assert experts.counted().tolist() == [40, 2, 0, 0]

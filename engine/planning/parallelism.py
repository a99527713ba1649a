"""Degrees by which ranks share a model, and each rank's part of layers and tensors.

This module knows counts, and is independent of bytes and devices.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.weights.shard import Shard


class Parallelism(NamedTuple):
    """Degrees of parallelism.

    `tp` ranks share every matrix of a stage; `ep` ranks have whole experts of it. If `ep` is larger than `tp`, there are several copies of the
    attention, which compute for different sequences. `pp` stages hold consecutive layers; the first also has the embedding and the head.
    """

    tp: int = 1
    pp: int = 1
    ep: int = 1
    spare: int = 0  # additional experts on each rank, as copies of the busiest ones

    @property
    def per_stage(self) -> int:
        return max(self.tp, self.ep)

    @property
    def size(self) -> int:
        return self.per_stage * self.pp

    @property
    def copies(self) -> int:
        """Return the number of copies of a stage's attention, each with different sequences."""
        return self.per_stage // self.tp

    @property
    def stage_places(self) -> "list[RankPlace]":
        """Return the first rank of each stage."""
        return [RankPlace(self, 0, stage) for stage in range(self.pp)]

    @classmethod
    def of_group(
        cls, size: int, num_stages: int, is_by_experts: bool, redundant: int = 0, copies: int = 1
    ) -> "Parallelism":
        """Return the degrees of a host with `size` ranks. Raises CheckpointError.

        `is_by_experts`: the ranks of a stage divide its experts, and together have `redundant` more copies of experts. `copies`: number of copies of
        the attention.
        """
        if size < 2:
            return cls()
        per_stage = size // num_stages
        if copies > 1 and (per_stage % copies or not is_by_experts):
            raise CheckpointError(
                f"data_parallel is {copies}, but a stage has {per_stage} ranks, which must form as many equal groups, with "
                f"expert_parallel; make it a divisor of {per_stage}, with expert_parallel, or 1"
            )
        if redundant % per_stage:
            raise CheckpointError(
                f"redundant_experts is {redundant}, and {per_stage} ranks share a layer's experts; make it a multiple"
            )
        return cls(per_stage // copies, num_stages, per_stage if is_by_experts else 1, redundant // per_stage)

    @classmethod
    def of_host(cls, host: HostConfig) -> "Parallelism":
        return cls.of_group(
            len(host.group), host.stages, host.expert_parallel, host.redundant_experts, host.data_parallel
        )

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, ep {self.ep}" + (f", dp {self.copies}" if self.copies > 1 else "")

    def require_counts(self, num_layers: int, num_heads: int, num_kv_heads: int, num_experts: int) -> None:
        """Raise CheckpointError if the degrees do not fit a model with so many layers, heads and experts.

        `num_kv_heads`: 0 if the model has no separate key-value heads.
        """
        for name, degree in zip(("tp", "pp", "ep"), self[:3], strict=True):
            if degree < 1:
                raise CheckpointError(f"{name} is {degree}; it must be at least 1")
        if self.pp > num_layers:
            raise CheckpointError(f"pp is {self.pp}, but the model has {num_layers} layers: use at most as many stages")
        if self.copies > 1 and not num_experts:
            raise CheckpointError(
                f"data_parallel is {self.copies}, but the model has no experts to divide: copies would share nothing, so run a host for each device"
            )
        if self.ep > 1 and (not num_experts or num_experts % self.ep):
            fits = [str(n) for n in range(2, num_experts + 1) if num_experts % n == 0]
            can = f"ep may be {', '.join(fits[:8])}" if fits else "leave ep at 1"
            raise CheckpointError(f"ep is {self.ep}, and the model has {num_experts} experts; {can}")
        if self.spare and num_experts // self.ep + self.spare > num_experts:
            most = num_experts * (self.ep - 1)
            copies = f"redundant_experts is {self.spare * self.ep}, but a rank has an expert only once"
            raise CheckpointError(
                f"{copies}: {num_experts} experts on {self.ep} ranks may have at most {most} more copies"
            )
        if not _shares_heads(self.tp, num_heads, num_kv_heads):
            fit = ", ".join(str(n) for n in range(1, num_heads + 1) if _shares_heads(n, num_heads, num_kv_heads))
            has = f"{num_heads} heads and {num_kv_heads or num_heads} key-value heads"
            raise CheckpointError(f"tp is {self.tp}, and the model has {has}; tp may be {fit}")
        if max(self.tp, self.ep) % min(self.tp, self.ep):
            raise CheckpointError(f"tp {self.tp} and ep {self.ep} do not divide one another; make one a multiple")

    def require_no_copies_of_states(self, layers: Sequence[CachedLayer]) -> None:
        """Raise CheckpointError if ranks with separate sequences would have a model whose layers keep states."""
        if self.copies > 1 and any(layer.is_state for layer in layers):
            raise CheckpointError(
                f"{self} makes {self.copies} copies of layers with recurrent states, which is not supported: set dp to 1"
            )


ALONE = Parallelism()


def _shares_heads(tp: int, num_heads: int, num_kv_heads: int) -> bool:
    return num_heads % tp == 0 and (not num_kv_heads or num_kv_heads % tp == 0 or tp % num_kv_heads == 0)


class RankPlace(NamedTuple):
    """One rank among those of a model."""

    parallelism: Parallelism
    rank: int = 0  # index of the rank in its stage
    stage: int = 0

    @property
    def copy(self) -> int:
        """Return the index of the rank's copy of the attention: ranks with the same shard are consecutive."""
        return self.rank % self.parallelism.copies

    @property
    def shard(self) -> Shard:
        return Shard(self.rank // self.parallelism.copies, self.parallelism.tp)

    def part_of(self, shape: WeightShape) -> tuple[int, int, int]:
        """Return the rank's number of matrices, and their rows and columns.

        Raises CheckpointError if the tensor does not divide.
        """
        tp, _, ep, spare = self.parallelism
        shard, count = self.shard, shape.experts
        if shape.experts and ep > 1:
            count = Shard(self.rank % ep, ep).span(shape.experts, name=shape.name).size + spare
            shard = Shard(self.rank // ep, tp // ep) if tp > ep else Shard()
        if shape.is_sum and shard.rank:
            return 0, 0, 0
        rows = shard.span(shape.rows, shape.unit, shape.name, shape.split == "rows", shape.may_repeat).size
        columns = (
            shard.span(shape.columns, shape.unit, shape.name, shape.split == "columns").size if shape.columns else 0
        )
        return max(1, count), rows, columns


@cache
def balanced_stages(costs: tuple[float, ...], first: float, num_stages: int) -> list[range]:
    """Divide layers into stages with the least maximal cost. `first`: added cost of the first stage."""
    ends = [0.0]
    for cost in costs:
        ends.append(ends[-1] + cost)
    num_layers = len(costs)

    def cost_of(stage: int, begin: int, end: int) -> float:
        return ends[end] - ends[begin] + (first if stage == 0 else 0.0)

    best = [[0.0] * (num_layers + 1) for _ in range(num_stages + 1)]
    cut = [[0] * (num_layers + 1) for _ in range(num_stages + 1)]
    for end in range(num_layers + 1):
        best[0][end] = 0.0 if end == 0 else float("inf")
    for stage in range(num_stages):
        for end in range(num_layers + 1):
            choices = [(max(best[stage][begin], cost_of(stage, begin, end)), begin) for begin in range(end)]
            best[stage + 1][end], cut[stage + 1][end] = min(choices, default=(float("inf"), 0))
    stages, end = [], num_layers
    for stage in range(num_stages, 0, -1):
        begin = cut[stage][end]
        stages.append(range(begin, end))
        end = begin
    return stages[::-1]

"""Finds all splits of a model over some devices, and orders those that fit by speed, with reasons.

memory_plan.py computes the memory of a split, speed.py its speed.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.planning.devices import GIB, DeviceSet
from pilotlight.engine.planning.memory_plan import RankMemory, StepLimits, all_ranks
from pilotlight.engine.planning.model_plan import PlannedModel
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.planning.speed import Speed, predict

DEFAULT_CONTEXT = 131_072
_PROMPT_TOKENS = 2048


class Workload(NamedTuple):
    """The load for which a plan is made."""

    context_length: int
    batch: int = 64  # number of sequences that decode at once
    prompt_tokens: int = _PROMPT_TOKENS
    limits: StepLimits = StepLimits()

    @property
    def decode_context(self) -> int:
        """Return the context for predictions of decoding speed: a prompt, and an answer of the same length."""
        return min(self.context_length, 2 * self.prompt_tokens)

    @classmethod
    def of(cls, model: PlannedModel, context_length: int | None = None, batch: int = 64) -> "Workload":
        """Return the workload for a context length, by default the model's, but at most 131,072 tokens.

        Raises CheckpointError.
        """
        longest = model.config.context_length
        if context_length is not None and not 2 <= context_length <= longest:
            raise CheckpointError(f"the context is {context_length} tokens; the model takes from 2 to {longest}")
        context = context_length or min(longest, DEFAULT_CONTEXT)
        return cls(context, batch, min(_PROMPT_TOKENS, context - 1))


class SplitPlan(NamedTuple):
    """One split of a model over devices."""

    parallelism: Parallelism
    ranks: list[RankMemory]
    workload: Workload
    speed: Speed | None  # None if the split does not fit

    @property
    def fits(self) -> bool:
        return all(rank.kv_bytes >= 0 for rank in self.ranks) and (
            self.ranks[0].layout is None or self.kv_tokens >= self.ranks[0].layout.block_size
        )

    @property
    def kv_bytes(self) -> int:
        """Return the bytes left for the KV cache, on all ranks together."""
        return sum(rank.kv_bytes for rank in self.ranks)

    @property
    def kv_tokens(self) -> int:
        """Return the number of tokens that fit, in sequences of the workload's context length.

        The rank with the least memory left limits the number; it is multiplied by the number of copies of the attention.
        """
        context, chunk = self.workload.context_length, self.workload.limits.max_num_batched_tokens
        return self.parallelism.copies * min(rank.kv_tokens(context, chunk) for rank in self.ranks)

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes the fullest rank lacks."""
        return max(0, -min(rank.kv_bytes for rank in self.ranks))


class ModelPlan(NamedTuple):
    """The splits of a model on some devices, and those that were refused."""

    model: PlannedModel
    devices: DeviceSet
    splits: list[SplitPlan]  # the fastest first, those that do not fit last
    refused: dict[Parallelism, str]  # refused splits, with the reason

    @property
    def best(self) -> SplitPlan:
        return self.splits[0]

    def reason(self, split: SplitPlan) -> str:
        """Return a sentence that explains the place of a split in the order."""
        if not split.fits:
            return f"does not fit: a rank lacks {split.missing_bytes / GIB:.1f} GiB"
        room = f"{split.kv_bytes / GIB:.1f} GiB for KV, {split.kv_tokens:,} tokens"
        assert split.speed is not None
        pace = f"{split.speed.tokens_per_s:,.0f} tokens/s at {split.speed.batch} sequences, {split.speed.token_s * 1e3:.1f} ms a token"
        if split is self.best:
            return f"most tokens a second of those that fit: {pace}; {room}"
        assert self.best.speed is not None
        return f"{split.speed.tokens_per_s / self.best.speed.tokens_per_s:.0%} of the best one's tokens a second: {pace}; {room}"


def make_plan(
    model: PlannedModel, devices: DeviceSet, workload: Workload, wanted: Parallelism | None = None
) -> ModelPlan:
    """Plan a model over devices, for one split or all. Raises CheckpointError if no split is possible."""
    splits, refused = [], {}
    for parallelism in [wanted] if wanted is not None else _candidates(model, devices.number):
        if parallelism.size > devices.number:
            raise CheckpointError(f"{parallelism} needs {parallelism.size} devices; {devices} are given")
        try:
            splits.append(_split_plan(model, parallelism, devices, workload))
        except CheckpointError as error:
            refused[parallelism] = str(error)
    if not splits:
        raise CheckpointError(next(iter(refused.values())))
    splits.sort(
        key=lambda split: (
            not split.fits,
            -split.speed.tokens_per_s if split.speed else split.missing_bytes,
        )
    )
    return ModelPlan(model, devices, splits, refused)


def _candidates(model: PlannedModel, count: int) -> Iterator[Parallelism]:
    """Yield the splits that use all devices."""
    for pp in range(1, min(count, model.config.num_layers) + 1):
        if count % pp == 0:
            per_stage = count // pp
            yield Parallelism(per_stage, pp)
            if model.num_experts and per_stage > 1 and model.num_experts % per_stage == 0:
                yield from (Parallelism(tp, pp, per_stage) for tp in range(1, per_stage + 1) if per_stage % tp == 0)


def _split_plan(model: PlannedModel, parallelism: Parallelism, devices: DeviceSet, workload: Workload) -> SplitPlan:
    ranks = all_ranks(model, parallelism, devices.device, workload.context_length, workload.limits)
    split = SplitPlan(parallelism, ranks, workload, None)
    if not split.fits:
        return split
    batch, context = workload.batch, workload.decode_context
    if ranks[0].layout is not None:
        chunk = workload.limits.max_num_batched_tokens
        room = parallelism.copies * min(rank.kv_tokens(context, chunk) for rank in ranks)
        batch = max(1, min(batch, room // context))
    speed = predict(model, parallelism, ranks, devices.device, context, workload.prompt_tokens, batch)
    return split._replace(speed=speed)


def described(plan: ModelPlan, price_per_hour: float | None = None) -> dict[str, Any]:
    """Return a plan as a JSON object. `price_per_hour`: price of one device."""
    model, workload = plan.model, plan.best.workload
    return {
        "architecture": model.architecture,
        "dtype": model.dtype,
        "format": model.quantization.method if model.quantization else "plain",
        "parameters": sum(shape.numbers for _, shape in model.weights()),
        "devices": str(plan.devices),
        "device_source": plan.devices.device.source,
        "context_length": workload.context_length,
        "splits": [_described(plan, split, price_per_hour) for split in plan.splits],
        "refused": [{**parallelism._asdict(), "reason": reason} for parallelism, reason in plan.refused.items()],
    }


def _described(plan: ModelPlan, split: SplitPlan, price_per_hour: float | None) -> dict[str, Any]:
    speed, chunk = split.speed, split.workload.limits.max_num_batched_tokens
    ranks = [
        {
            "weights_bytes": rank.weights_bytes,
            **{f"{part}_weights_bytes": size for part, size in rank.weights.items()},
            "tables_bytes": rank.tables_bytes,
            "activations_bytes": rank.activations_bytes,
            "reserved_bytes": rank.reserved_bytes,
            "device_bytes": rank.device_bytes,
            "kv_bytes": rank.kv_bytes,
            "kv_tokens": rank.kv_tokens(split.workload.context_length, chunk),
        }
        for rank in split.ranks
    ]
    totals = {
        f"total_{key}": sum(rank[key] for rank in ranks) for key in ("weights_bytes", "activations_bytes", "kv_bytes")
    }
    found: dict[str, Any] = {
        **split.parallelism._asdict(),
        "dp": split.parallelism.copies,
        "fits": split.fits,
        "reason": plan.reason(split),
        **totals,
        "total_kv_tokens": split.kv_tokens,
        "ranks": ranks,
    }
    if speed is not None:
        found["speed"] = speed._asdict()
        if price_per_hour is not None:
            per_s = price_per_hour * split.parallelism.size / 3600
            found["cost_per_million_tokens"] = per_s / speed.tokens_per_s * 1e6
    return found

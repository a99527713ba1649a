"""The catalogue's entries from logits to tokens: penalties, masks, sampling, log-probabilities.

All of them compute in fp32.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.sampling import logprobs, masks, penalties, sample
from pilotlight.kernels.sampling.penalties import LogitEntries
from pilotlight.kernels.sampling.philox import uniform
from pilotlight.kernels.sampling.sampling_batch import POWER, SamplingBatch, SamplingRow
from pilotlight.kernels.sampling.sampling_scale import FAR, GREEDY_SCALE

# Values of (temperature, top_k, top_p, min_p): each off, alone, with others and at its limit; a temperature of 0 is greedy.
_KINDS: tuple[tuple[float, int | None, float, float], ...] = (
    (1.0, None, 1.0, 0.0), (0.7, 3, 1.0, 0.0), (1.3, None, 0.8, 0.0), (1.0, None, 1.0, 0.2), (0.9, 20, 0.9, 0.05), (0.0, None, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0), (2.0, None, 1e-6, 0.0), (1.0, None, 0.999, 0.0), (1e-3, 7, 0.5, 0.0), (1.0, 5, 0.999, 0.9), (0.8, 1 << 20, 0.3, 0.0),
)  # fmt: skip
_CHAT = ((0.7, None, 0.95, 0.0), (0.6, 20, 0.95, 0.0), (1.0, None, 1.0, 0.05), (0.8, 50, 1.0, 0.0))
_GREEDY = ((0.0, None, 1.0, 0.0),)

Logits = Callable[[int, int], Tensor]


def _sampling(
    name: str,
    rows: int,
    vocab: int,
    kinds: Sequence[tuple[float, int | None, float, float]],
    logits: Logits,
    target: Target | None = None,
) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        drawn = logits(rows, vocab).to(dtype)
        seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), device="cpu").tolist()
        asked = [SamplingRow(*kinds[i % len(kinds)], seed=seed % 2**64, position=7 * i) for i, seed in enumerate(seeds)]
        return {"logits": drawn, "batch": SamplingBatch.of(asked, vocab, lambda tensor: tensor.to(drawn.device))}

    return Case(f"{rows} x {vocab} {name}", make, target)


def _peaked(rows: int, vocab: int) -> Tensor:
    """Return logits by Zipf's law, like a language model's: the token of rank r has weight r**-1.2."""
    ranks = torch.stack([torch.randperm(vocab) for _ in range(rows)])
    return -1.2 * (ranks + 1).float().log() + 0.1 * torch.randn(rows, vocab)


def _flat(rows: int, vocab: int) -> Tensor:
    return 0.01 * torch.randn(rows, vocab)


def _tied(rows: int, vocab: int) -> Tensor:
    return torch.randint(0, 5, (rows, vocab)).float()


def _sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Sample row by row as the formula says: sort the tokens, and sum their weights as Python integers."""
    integers, reals = batch.integers.cpu(), batch.reals.cpu()
    chosen = [_chosen(*row) for row in zip(logits.float().cpu().numpy(), integers.T, reals.T.tolist(), strict=True)]
    return torch.tensor(chosen, dtype=torch.int64, device=logits.device), logits.amax(-1)


def _chosen(logits: "np.typing.NDArray[np.float32]", integers: Tensor, reals: list[float]) -> int:
    _, _, top_k, highest = integers.tolist()
    scale, top_p = reals
    if scale == GREEDY_SCALE:
        return int(logits.argmax())
    costs = np.minimum((logits.max() - logits) * np.float32(scale), np.float32(FAR)).astype(np.int64)
    part = (costs % (1 << 24)).astype(np.float32) * np.float32(2.0**-24)
    power = np.full_like(part, POWER[0])
    for factor in POWER[1:]:
        power = power * part + np.float32(factor)
    weights = [(int(p) << 18) >> (int(cost) >> 24) for p, cost in zip(power.tolist(), costs.tolist(), strict=True)]
    in_order = np.sort(costs).tolist()
    floor = highest if top_k >= len(logits) else min(highest, in_order[top_k - 1])
    kept = sorted((cost, weight) for cost, weight in zip(costs.tolist(), weights, strict=True) if cost <= floor)
    if top_p < 1.0:
        wanted = max(1, int(top_p * float(sum(weight for _, weight in kept))))
        for cost, weight in kept:
            wanted -= weight
            floor = cost
            if wanted <= 0:
                break
    left = [weight if cost <= floor else 0 for cost, weight in zip(costs.tolist(), weights, strict=True)]
    number = uniform(integers[:1] & 0xFFFFFFFF, integers[:1] >> 32 & 0xFFFFFFFF, integers[1:2]).item()
    target = min(int(number * float(sum(left))), sum(left) - 1)
    for token, weight in enumerate(left):
        target -= weight
        if target < 0:
            return token
    raise AssertionError("some token has a weight")


def _by_sort(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """Sample with torch as most engines do: sort, cumulative sum, multinomial."""
    ordered, ids = (logits * (batch.reals[0] * 2.0**-24).float().unsqueeze(1)).sort(-1, descending=True)
    weights = ordered.softmax(-1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(before >= batch.reals[1].unsqueeze(1), 0.0)
    return ids.gather(1, weights.multinomial(1)).squeeze(1)


SAMPLE = Operation(
    name="sample",
    function=sample.sample,
    reference=_sample,
    roundings=0,  # tokens are integers, and the highest logit is copied from the input
    dtypes=(torch.float32,),
    cases=(
        _sampling("peaked", 24, 431, _KINDS, _peaked),
        _sampling("normal", 12, 42, _KINDS, lambda *shape: 3 * torch.randn(*shape)),
        _sampling("tied", 12, 123, _KINDS, _tied),
        _sampling("in two chunks", 12, 9001, _KINDS, _peaked),
        _sampling("whose window is longer than a tile", 4, 9001, _KINDS[2:6:2] + _KINDS[10:], _flat),
        _sampling("greedy", 3, 8193, _GREEDY, _tied),
        _sampling("of one token", 12, 1, _KINDS, _flat),
        _sampling("of nobody", 0, 9, _KINDS, _flat),
    ),
    bench=(
        _sampling("Zipf", 64, 128_256, _CHAT, _peaked, Target(us=60)),
        _sampling("greedy", 64, 128_256, _GREEDY, _peaked, Target(us=60)),
        _sampling("Zipf", 1, 128_256, _CHAT, _peaked),
        _sampling("normal, flatter than any model's", 64, 128_256, _CHAT, torch.randn),
    ),
    cost=lambda arguments: Cost(size(arguments["logits"])),
    rivals={"torch, sorting": _by_sort},
)


def _entries(rows: int, vocab: int, each: int) -> LogitEntries:
    tokens = torch.cat([torch.randperm(vocab)[:each] for _ in range(rows)])
    count = rows * each
    outputs = torch.randint(0, 4, (count,)).float()
    return LogitEntries(
        rows=torch.arange(rows).repeat_interleave(each),
        token_ids=tokens,
        bias=torch.randn(count) * (torch.rand(count) < 0.3),
        seen=((outputs > 0) | (torch.rand(count) < 0.5)).float(),
        num_outputs=outputs,
        repetition=torch.rand(count) + 0.5,
        presence=torch.randn(count),
        frequency=torch.randn(count),
    )


def _penalizing(rows: int, vocab: int, each: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        return {"logits": 5 * torch.randn(rows, vocab).to(dtype), "entries": _entries(rows, vocab, each)}

    return Case(f"{each} of {vocab} in {rows} rows", make)


def _restoring(rows: int, vocab: int, each: int) -> Case:
    case = _penalizing(rows, vocab, each)

    def make(dtype: torch.dtype) -> Arguments:
        return {**case.make(dtype), "before": torch.randn(rows * each).to(dtype)}

    return Case(case.name, make)


def _penalized(logits: Tensor, entries: LogitEntries) -> Tensor:
    places = (entries.rows, entries.token_ids)
    before = logits[places]
    biased = before + entries.bias
    repeated = torch.where(biased > 0, biased / entries.repetition, biased * entries.repetition)
    penalty = entries.frequency * entries.num_outputs + entries.presence * (entries.num_outputs > 0)
    logits[places] = torch.where(entries.seen > 0, repeated, biased) - penalty
    return before


def _restored(logits: Tensor, entries: LogitEntries, before: Tensor) -> None:
    logits[entries.rows, entries.token_ids] = before


def _cost_of_entries(arguments: Arguments) -> Cost:
    """Count every column once, and a logit read and written for each entry."""
    entries = arguments["entries"]
    return Cost(size(*entries) + 8 * len(entries.rows))


_ENTRIES = ((3, 42, 7), (1, 1, 1), (5, 431, 123), (2, 9, 0))

PENALIZE = Operation(
    name="penalize",
    function=penalties.penalize_,
    reference=_penalized,
    roundings=3,  # those of a sum, reciprocal, product, penalty and difference, each half a unit at most
    dtypes=(torch.float32,),
    cases=tuple(_penalizing(*shape) for shape in _ENTRIES),
    bench=(_penalizing(64, 128_256, 1000),),
    cost=_cost_of_entries,
    changes=("logits",),
)
RESTORE = Operation(
    name="restore",
    function=penalties.restore_,
    reference=_restored,
    roundings=0,
    dtypes=(torch.float32,),
    cases=tuple(_restoring(*shape) for shape in _ENTRIES),
    bench=(_restoring(64, 128_256, 1000),),
    cost=_cost_of_entries,
    changes=("logits",),
)


def _masking(rows: int, vocab: int, masks: int, words: int | None = None) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        bits = torch.randint(-(2**31), 2**31, (masks, -(-vocab // 32) if words is None else words), dtype=torch.int32)
        bits[:, ::3] = -1
        return {"logits": torch.randn(rows, vocab).to(dtype), "rows": torch.randperm(rows)[:masks], "bits": bits}

    return Case(f"{masks} of {rows} rows of {vocab}" + ("" if words is None else f", {words} words"), make)


def _masked(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Compute the formula token by token."""
    words = bits.tolist()
    for row, mask in zip(rows.tolist(), words, strict=True):
        for token in range(logits.shape[1]):
            if token // 32 >= len(mask) or not mask[token // 32] >> token % 32 & 1:
                logits[row, token] = masks.LOWEST


MASK = Operation(
    name="mask",
    function=masks.mask_,
    reference=_masked,
    roundings=0,
    dtypes=(torch.float32,),
    cases=(
        _masking(3, 70, 2), _masking(1, 32, 1), _masking(4, 31, 4), _masking(2, 1500, 1), _masking(2, 100, 2, words=2),
        _masking(2, 64, 2, words=5), _masking(2, 9, 0),
    ),
    bench=(_masking(64, 128_256, 64), _masking(1, 128_256, 1)),
    cost=lambda arguments: Cost(size(arguments["bits"]) + 4 * arguments["bits"].shape[0] * arguments["logits"].shape[1]),
    changes=("logits",),
)  # fmt: skip


def _reporting(rows: int, vocab: int, num_top: int) -> Case:
    def make(dtype: torch.dtype) -> Arguments:
        # no two logits of a row are equal: the order of equal ones is unspecified
        logits = torch.stack([torch.randperm(vocab) for _ in range(rows)]).to(dtype) * (24.0 / vocab) - 12
        return {"logits": logits, "token_ids": torch.randint(vocab, (rows,)), "num_top": num_top}

    return Case(f"{num_top} of {vocab} in {rows} rows", make)


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    all_of_them = logits - logits.exp().sum(-1, keepdim=True).log()
    top = all_of_them.sort(descending=True)
    num_top = min(num_top, logits.shape[1])
    return all_of_them.gather(1, token_ids.unsqueeze(1)).squeeze(1), top.indices[:, :num_top], top.values[:, :num_top]


LOGPROBS = Operation(
    name="token_logprobs",
    function=logprobs.token_logprobs,
    reference=_logprobs,
    # A log-probability is a difference of two numbers, which may be ten times larger than it; the sum of powers adds a few roundings.
    roundings=20,
    dtypes=(torch.float32,),
    cases=tuple(_reporting(*shape) for shape in ((3, 42, 5), (2, 5000, 3), (2, 4097, 0), (1, 3, 20), (4, 8200, 20))),
    bench=(_reporting(64, 128_256, 20), _reporting(1, 128_256, 5)),
    cost=lambda arguments: Cost(size(arguments["logits"])),
)
OPERATIONS = (SAMPLE, PENALIZE, RESTORE, MASK, LOGPROBS)

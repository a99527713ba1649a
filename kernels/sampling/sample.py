"""Choice of one token per row of logits: temperature, min-p, top-k, top-p, then inversion of the CDF.

Rows of temperature 0 take the likeliest token, the first of equals.

A logit's distance from its row's highest is rounded to a *cost*, in 2**-24 of a factor of two, and a cost has a *weight*, an integer. From the cost
on, all numbers are integers: sums are equal in any order, so that a token depends on no device, form, batch or split of the vocabulary. A cost takes
only one subtraction and one product, which IEEE 754 rounds alike everywhere. Tokens of equal cost are kept or dropped together, so neither sort order
nor device decides. One uniform number per token is used instead of one Gumbel number per vocabulary entry: 64 rows over 128k entries would need 8 M
Philox calls a step.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import sampling
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.sampling.philox import uniform
from pilotlight.kernels.sampling.sampling_batch import MAX_VOCAB, POWER, SamplingBatch
from pilotlight.kernels.sampling.sampling_scale import FAR, PIECE

# Number of a row's highest logits that are examined first; nearly every nucleus is within them. Finding the largest 256 of 128k logits takes 0.3 ms
# a row on a CPU core, sorting all of them 10 ms.
NUM_CANDIDATES = 256
_MASK32 = 0xFFFFFFFF


def _check(check: ArgumentCheck, logits: Tensor, batch: SamplingBatch) -> None:
    check.tensor("logits", logits, "rows vocab", (torch.float32,), dense=1)
    vocab = logits.shape[1]
    check.require("logits", 0 < vocab <= MAX_VOCAB, f"has {vocab} entries a row, wanted 1 to {MAX_VOCAB}")
    check.tensor("batch.integers", batch.integers, "4 rows", (torch.int64,), dense=2)
    check.tensor("batch.reals", batch.reals, "2 rows", (torch.float64,), dense=2)


def _check_logits(check: ArgumentCheck, logits: Tensor) -> None:
    check.tensor("logits", logits, "rows vocab", (torch.float32,))
    check.require("logits", logits.shape[1] > 0, "has no entry to choose from")


@operation(_check, triton="sampling.sample")
def sample(logits: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """Return the sampled ids [rows] int64, and each row's highest logit [rows], NaN if any logit is.

    logits [rows, vocab] fp32.
    """
    ids, tops = argmax(logits)
    if len(batch.drawn) == len(logits):
        return draw(logits, tops, batch), tops
    if not batch.drawn:
        return ids, tops
    rows = torch.tensor(batch.drawn, device="cpu")
    rows = rows.pin_memory().to(logits.device, non_blocking=True) if logits.is_cuda else rows
    drawn = draw(logits.index_select(0, rows), tops.index_select(0, rows), batch.select(rows))
    return ids.index_copy(0, rows, drawn), tops


@operation(_check_logits, native=sampling.argmax)
def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each row's first highest logit, and that logit, NaN if any is NaN; [rows] each."""
    best = logits.max(dim=-1)
    return best.indices, best.values


def draw(
    logits: Tensor,
    tops: Tensor,
    batch: SamplingBatch,
    random: Callable[[Tensor, Tensor, Tensor], Tensor] = uniform,
    num_candidates: int = NUM_CANDIDATES,
) -> Tensor:
    """Return ids [rows] drawn from logits [rows, vocab] with maxima `tops`. No row may be greedy.

    `random` returns a number in [0, 1) for each row's seed, in two halves, and position.
    """
    seed, position, top_k, floor = batch.integers
    scale, top_p = batch.reals
    rows = _Rows(logits, tops, scale)
    if batch.truncates:
        vocab = logits.shape[1]
        # Examining flat rows a second time would make the host wait for a GPU; there, everything is sorted at once instead.
        candidates = vocab if logits.is_cuda else min(vocab, max(num_candidates, batch.largest_top_k))
        floor = rows.truncated(top_k, top_p, floor, candidates)
    return pick(
        rows.sums(floor),
        random(seed & _MASK32, seed >> 32 & _MASK32, position),
        lambda entries: rows.weights_of(entries, floor),
    )


class _Rows:
    """Logits as costs and weights, computed on demand."""

    def __init__(self, logits: Tensor, tops: Tensor, scale: Tensor) -> None:
        self._logits = logits  # [rows, vocab]
        self._tops = tops.contiguous()  # [rows]
        self._scale = scale.contiguous()  # [rows]
        self._all: tuple[Tensor, Tensor] | None = None

    def sums(self, floor: Tensor) -> Tensor:
        """Return the weights of entries that cost at most `floor` [rows], summed in pieces: [rows, pieces]."""
        native = sampling.sampling_sums(self._logits, self._tops, self._scale, floor)
        if native is not None:
            return native
        if self._all is None:
            self._all = weigh(self._logits, self._tops, self._scale)
        costs, weights = self._all
        # a product, since masked_fill branches per entry on a CPU and is five times slower
        return piece_sums(weights * (costs <= floor.unsqueeze(1)))

    def weights_of(self, entries: Tensor, floor: Tensor) -> Tensor:
        """Return the weights of entries [rows, n].

        Entries that cost more than `floor` [rows], or are outside the vocabulary, weigh 0.
        """
        vocab = self._logits.shape[1]
        logits = self._logits.gather(1, entries.clamp(max=vocab - 1)).masked_fill_(entries >= vocab, -torch.inf)
        costs, weights = weigh(logits, self._tops, self._scale)
        return weights * (costs <= floor.unsqueeze(1))

    def truncated(self, top_k: Tensor, top_p: Tensor, floor: Tensor, candidates: int) -> Tensor:
        """Return the highest cost [rows] that survives min-p (`floor`), top-k and top-p, in this order."""
        vocab = self._logits.shape[1]
        ordered = self._logits.topk(candidates, dim=-1).values  # the cheapest first
        costs, weights = weigh(ordered, self._tops, self._scale)
        kth = costs.gather(1, (top_k - 1).clamp(max=candidates - 1).unsqueeze(1)).squeeze(1)
        floor = torch.where(top_k < vocab, torch.minimum(floor, kth), floor)
        total = self.sums(floor).sum(-1)
        wanted = (top_p * total.double()).long().clamp(min=1)
        cumulative = (weights * (costs <= floor.unsqueeze(1))).cumsum(-1)
        last = (cumulative < wanted.unsqueeze(1)).sum(-1)
        reached = last < candidates
        nucleus = costs.gather(1, last.clamp(max=candidates - 1).unsqueeze(1)).squeeze(1)
        floor_of_all = torch.where((top_p < 1.0) & reached, torch.minimum(floor, nucleus), floor)
        if candidates < vocab:
            open_rows = ((top_p < 1.0) & ~reached).nonzero().squeeze(1)
            # rows whose distribution is flatter than the candidates reach: examine more of their tokens
            if open_rows.numel():
                rest = _Rows(self._logits[open_rows], self._tops[open_rows], self._scale[open_rows])
                floor_of_all[open_rows] = rest.truncated(
                    top_k[open_rows], top_p[open_rows], floor[open_rows], min(vocab, 8 * candidates)
                )
        return floor_of_all


def weigh(logits: Tensor, tops: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return costs [rows, n] int32 and weights [rows, n] int64.

    logits [rows, n]; tops and scale [rows]: the highest logit of each row and its scale.
    """
    distance = (tops.unsqueeze(1) - logits).mul_(scale.float().unsqueeze(1)).nan_to_num_(nan=FAR).clamp_(max=FAR)
    costs = distance.int()
    part = (costs & (1 << 24) - 1).float().mul_(2.0**-24)
    power = part * POWER[0]
    for factor in POWER[1:-1]:
        power.add_(factor).mul_(part)
    return costs, (power.add_(POWER[-1]).long() << 18) >> (costs >> 24)


def piece_sums(weights: Tensor) -> Tensor:
    """Sum weights [rows, vocab] int64 to [rows, pieces]."""
    rows, vocab = weights.shape
    whole = vocab // PIECE * PIECE
    sums = weights[:, :whole].view(rows, whole // PIECE, PIECE).sum(-1)
    return sums if whole == vocab else torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True)), dim=1)


def pick(sums: Tensor, uniform: Tensor, weights_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ids [rows] drawn in proportion to weight.

    That is the first entry whose cumulative weight, in vocabulary order, exceeds the uniform number's share of the total. sums [rows, pieces] int64;
    uniform [rows] float64 in [0, 1); weights_of returns the weights of entries [rows, PIECE], some of them outside the vocabulary.
    """
    ends = sums.cumsum(1)
    total = ends[:, -1:]
    # In float64 the product may be rounded up to the total.
    target = (uniform.unsqueeze(1) * total.double()).long().minimum(total - 1)
    piece = _first_above(ends, target)
    start = ends.gather(1, piece) - sums.gather(1, piece)
    entries = piece * PIECE + torch.arange(PIECE, device=sums.device)
    return entries.gather(1, _first_above(weights_of(entries).cumsum(1), target - start)).squeeze(1)


def _first_above(ends: Tensor, target: Tensor) -> Tensor:
    """Return the index of the first cumulative sum above the target. The entry there has a weight above 0."""
    return (ends <= target).sum(1, keepdim=True).clamp(max=ends.shape[1] - 1)

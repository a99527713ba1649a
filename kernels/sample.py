"""Picks one token per row from logits: temperature, min-p, top-k, top-p, then inversion of the cumulative distribution.

One uniform number per token instead of one Gumbel number per vocabulary entry: 64 rows over 128k entries would need 8 M
Philox calls a step. Truncation keeps every token as likely as the last one kept: ties stay together, so neither sort
order nor device decides what is kept.
"""

import torch

from kernels.checks import Call, placed

# Enough for nearly every nucleus: finding the largest 256 of 128k weights takes 0.3 ms a row on a CPU core, sorting
# them all 10 ms.
NUM_CANDIDATES = 256
_PIECE = 1024  # vocabulary entries summed together before the cumulative sum


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [rows, vocab] -> ids [rows] int64."""
    if not (logits.dim() == 2 and logits.shape[1] and logits.dtype.is_floating_point):
        call = Call("greedy")
        call.tensor("logits", logits, "rows vocab")
        call.require("logits", logits.shape[1] > 0, "has no entry to choose from")
    return logits.argmax(dim=-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    largest_top_k: int,
    truncates: bool,
) -> torch.Tensor:
    """logits [rows, vocab] fp32; temperature [rows] > 0; top_k [rows] int64 (vocab: off); top_p [rows] (1: off); min_p
    [rows] (0: off); uniform [rows] float64 in [0, 1) -> ids [rows] int64. What the host knows saves a wait for the
    device: the largest finite top_k (0: none), and whether any row truncates by top-k or top-p."""
    _check(logits, temperature, top_k, top_p, min_p, uniform, largest_top_k)
    # The likeliest token weighs 1, so min-p is a floor as it stands.
    weights = (logits - logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1)).exp_()
    floor = min_p.unsqueeze(1)
    if truncates:
        vocab = logits.shape[1]
        # A second look at flat rows would make the host wait for a GPU, which sorts everything at once instead.
        candidates = vocab if logits.is_cuda else min(vocab, max(NUM_CANDIDATES, largest_top_k))
        floor = _floor(weights, top_k.unsqueeze(1), top_p.double().unsqueeze(1), floor, candidates)
    return pick(_keep(weights, floor), uniform)


def _floor(
    weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, floor: torch.Tensor, candidates: int
) -> torch.Tensor:
    """The smallest weight that survives min-p, top-k and top-p, each applied to what the one before left: [rows, 1]."""
    vocab = weights.shape[1]
    ordered = weights.topk(candidates, dim=-1).values  # [rows, candidates], descending
    kth = ordered.gather(1, (top_k - 1).clamp(max=candidates - 1))
    floor = torch.where(top_k < vocab, torch.maximum(floor, kth), floor)
    wanted = top_p * _keep(weights, floor).sum(-1, keepdim=True, dtype=torch.float64)
    cumulative = _keep(ordered, floor).cumsum(-1, dtype=torch.float64)
    # Rounding may leave the last cumulative sum below the total: then the nucleus is all that was left.
    reached = cumulative[:, -1:] >= wanted
    last = (cumulative < wanted).sum(-1, keepdim=True).clamp(max=candidates - 1)
    nucleus = torch.where((top_p < 1.0) & reached, ordered.gather(1, last), floor)
    floor_of_all = torch.maximum(floor, nucleus)
    if candidates < vocab:
        open_rows = ((top_p < 1.0) & ~reached).squeeze(1).nonzero().squeeze(1)
        if open_rows.numel():  # a distribution flatter than the candidates: look at more of those rows
            floor_of_all[open_rows] = _floor(
                weights[open_rows], top_k[open_rows], top_p[open_rows], floor[open_rows], min(vocab, 8 * candidates)
            )
    return floor_of_all


def _keep(weights: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    # A product, not masked_fill: on a CPU that branches per entry and is five times slower.
    return weights * (weights >= floor)


def pick(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """weights [rows, vocab] >= 0 with a positive sum; uniform [rows] float64 in [0, 1) -> ids [rows] drawn in
    proportion to weight.

    Inversion in two levels, in float64 and in vocabulary order: first the piece of 1,024 entries, then the entry inside
    it. A cumulative sum over 128k fp32 entries would lose the unlikely tokens to rounding and, summed in parallel,
    might even decrease.
    """
    rows, vocab = weights.shape
    whole = vocab // _PIECE * _PIECE
    sums = weights[:, :whole].view(rows, whole // _PIECE, _PIECE).sum(-1, dtype=torch.float64)
    if whole < vocab:
        sums = torch.cat((sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)), dim=1)
    ends = sums.cumsum(1)
    target = uniform.unsqueeze(1) * ends[:, -1:]
    piece = _first_above(ends, target)
    start = ends.gather(1, piece) - sums.gather(1, piece)
    entries = piece * _PIECE + torch.arange(min(_PIECE, vocab), device=weights.device)
    inside = weights.gather(1, entries.clamp(max=vocab - 1)).double().masked_fill_(entries >= vocab, 0.0).cumsum(1)
    # Summed again in another order, the piece may start or end a rounding beside the target: stay inside, or a weight
    # of zero could be met.
    below_end = torch.nextafter(inside[:, -1:], torch.zeros_like(target))
    return entries.gather(1, _first_above(inside, (target - start).clamp(min=0.0).minimum(below_end))).squeeze(1)


def _first_above(ends: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first cumulative sum beyond the target: it ends a positive weight, whatever zeros lie around it."""
    return (ends <= target).sum(1, keepdim=True).clamp(max=ends.shape[1] - 1)


def _check(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    uniform: torch.Tensor,
    largest_top_k: int,
) -> None:
    rows = logits.shape[:1]
    if not (
        logits.dim() == 2
        and logits.shape[1]
        and logits.dtype == temperature.dtype == top_p.dtype == min_p.dtype == torch.float32
        and top_k.dtype == torch.int64
        and uniform.dtype == torch.float64
        and temperature.shape == top_k.shape == top_p.shape == min_p.shape == uniform.shape == rows
        and 0 <= largest_top_k <= logits.shape[1]
        and placed(logits, temperature, top_k, top_p, min_p, uniform)
    ):
        call = Call("sample")
        call.tensor("logits", logits, "rows vocab", (torch.float32,))
        call.require("logits", logits.shape[1] > 0, "has no entry to choose from")
        for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
            call.tensor(name, values, "rows", (torch.float32,))
        call.tensor("top_k", top_k, "rows", (torch.int64,))
        call.tensor("uniform", uniform, "rows", (torch.float64,))
        vocab = logits.shape[1]
        call.require(
            "largest_top_k", 0 <= largest_top_k <= vocab, f"is {largest_top_k}, wanted 0 to {vocab}, the vocabulary"
        )

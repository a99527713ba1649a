"""Low-rank adapters beside a matrix product: y += B (A x), each token with its own adapter or none.

The adapters of a model share one tensor; a table holds, for each slot and projection, the offsets of A and B in it, and their rank. So the
computation depends only on numbers on the device, and a recorded step can be replayed after other adapters have been loaded into the slots. This
module knows slots, and is independent of which adapters they hold.
"""

import torch

from pilotlight.kernels import checks
from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import ops
from pilotlight.kernels.dispatch import operation

COLUMNS = 64  # columns of y per block of B, [blocks, rank, 64], so that a thread adds to adjacent columns
MOST_RANK = 64
RANKS = (8, 16, 32, MOST_RANK)  # ranks to which A and B are padded with zeros
MOST_PARTS = 3  # projections that are fused into one product: queries, keys and values
SKIPPED = -1  # the slot of a token without an adapter


def padded_rank(rank: int) -> int:
    """Return the padded rank at which an adapter is stored."""
    return next(padded for padded in RANKS if padded >= rank)


def num_values(rank: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the number of values of A and B of a projection [rows, columns] in a slot, at a padded rank."""
    return rank * columns, -(-rows // COLUMNS) * rank * COLUMNS


def blocked(b: torch.Tensor) -> torch.Tensor:
    """Return b [rows, rank] as [blocks, rank, 64], padded with zero rows."""
    rows, rank = b.shape
    padded = b.new_zeros(-(-rows // COLUMNS) * COLUMNS, rank)
    padded[:rows] = b
    return padded.view(-1, COLUMNS, rank).transpose(1, 2).contiguous()


def _check(
    check: ArgumentCheck,
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    ends: tuple[int, ...],
) -> None:
    check.tensor("x", x, "tokens inputs", dense=1)
    check.tensor("y", y, "tokens outputs", (x.dtype,), dense=2)
    check.tensor("adapters", adapters, "values", (x.dtype,), dense=1)
    check.require("ends", 0 < len(ends) <= MOST_PARTS, f"names {len(ends)} parts, wanted 1 to {MOST_PARTS}")
    check.agree("ends[-1]", "outputs", ends[-1])
    check.derive("parts", len(ends), "ends")
    check.tensor("places", places, "slots parts 3", (torch.int64,), dense=2)
    check.tensor("slots", slots, "tokens", (torch.int64,), dense=1)
    check.indices("slots", slots, places.shape[0], "the existing slots, or -1", SKIPPED)
    if checks.DEBUG:
        _check_places(check, x.shape[1], adapters.numel(), places, slots, ends)


def _check_places(
    check: ArgumentCheck, inputs: int, size: int, places: torch.Tensor, slots: torch.Tensor, ends: tuple[int, ...]
) -> None:
    """Refuse A and B of the slots in use that are not within `size` values.

    Waits for the device: only for debug mode.
    """
    for slot in set(slots.tolist()) - {SKIPPED}:
        for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            a_at, b_at, rank = places[slot, part].tolist()
            a_size, b_size = num_values(max(0, rank), end - begin, inputs)
            fits = rank in RANKS and 0 <= a_at <= size - a_size and 0 <= b_at <= size - b_size
            why = f"has rank {rank} at {a_at} and {b_at} in slot {slot}, wanted one of {RANKS} within {size} values"
            check.require("places", fits or not rank, why)


@operation(_check, triton="lora", native=ops.add_lora, guards_itself=True)
def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    adapters: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    ends: tuple[int, ...],
) -> torch.Tensor:
    """Add each token's adapter to the product y, in place; sums are fp32, rounded once.

    y [tokens, outputs]: the product's parts side by side, of which part i ends before column ends[i]; x [tokens, inputs]; adapters [values]; places
    [slots, parts, 3] int64: the offsets of A [rank, inputs] and B [blocks, rank, 64], and the rank, one of RANKS, or 0 for a part without adapter;
    slots [tokens] int64, -1 for a token without adapter.
    """
    inputs = x.shape[1]
    for slot in set(slots.tolist()):
        if slot == SKIPPED:
            continue
        rows, begin = (slots == slot).nonzero().squeeze(1), 0
        for part, end in enumerate(ends):
            a_at, b_at, rank = places[slot, part].tolist()
            if rank:
                a_size, b_size = num_values(rank, end - begin, inputs)
                if a_at + a_size > len(adapters) or b_at + b_size > len(adapters):
                    raise IndexError(f"an adapter's values up to {max(a_at + a_size, b_at + b_size)} are out of range")
                a = adapters[a_at : a_at + a_size].view(rank, inputs).float()
                b = adapters[b_at : b_at + b_size].view(-1, rank, COLUMNS).transpose(1, 2).reshape(-1, rank).float()
                added = x[rows].float() @ a.T @ b[: end - begin].T
                y[rows, begin:end] = (y[rows, begin:end].float() + added).to(y.dtype)
            begin = end
    return y

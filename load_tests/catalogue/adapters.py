"""The catalogue's entry of low-rank adapters, whose results are added to a matrix product."""

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels import lora


def random_adapters(
    ranks: tuple[int, ...], sizes: tuple[int, ...], columns: int, dtype: torch.dtype, without: tuple[tuple[int, int], ...] = ()
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return adapters of these padded ranks in one buffer, and their places in it.

    `without`: (slot, part) of projections that have no adapter.
    """
    values, places, at = [], torch.zeros(len(ranks), len(sizes), 3, dtype=torch.int64), 0
    for slot, rank in enumerate(ranks):
        for part, rows in enumerate(sizes):
            if (slot, part) in without:
                continue
            a = torch.randn(rank, columns) / columns**0.5
            b = lora.blocked(torch.randn(rows, rank) / rank**0.5)
            places[slot, part] = torch.tensor([at, at + a.numel(), rank])
            values += [a.flatten().to(dtype), b.flatten().to(dtype)]
            at += a.numel() + b.numel()
    return torch.cat(values), places


def _added(y: Tensor, x: Tensor, adapters: Tensor, places: Tensor, slots: Tensor, ends: tuple[int, ...]) -> Tensor:
    for token, slot in enumerate(slots.tolist()):
        for part, (begin, end) in enumerate(zip((0, *ends), ends, strict=False)):
            a_at, b_at, rank = places[slot, part].tolist()
            if slot < 0 or not rank:
                continue
            a = adapters[a_at : a_at + rank * x.shape[1]].view(rank, -1)
            blocks = -(-(end - begin) // lora.COLUMNS)
            b = adapters[b_at : b_at + blocks * rank * lora.COLUMNS].view(blocks, rank, lora.COLUMNS)
            y[token, begin:end] += torch.einsum("brc,r->bc", b, a @ x[token]).flatten()[: end - begin]
    return y


def _case(
    slots: tuple[int, ...], ranks: tuple[int, ...], sizes: tuple[int, ...], columns: int, target: Target | None = None,
    without: tuple[tuple[int, int], ...] = (), gap: int = 0,
) -> Case:  # fmt: skip
    """Make a case. `gap`: padding columns between two rows of x."""

    def make(dtype: torch.dtype) -> Arguments:
        adapters, places = random_adapters(ranks, sizes, columns, dtype, without)
        ends = tuple(torch.tensor(sizes).cumsum(0).tolist())
        return {
            "y": torch.randn(len(slots), ends[-1]).to(dtype),
            "x": torch.randn(len(slots), columns + gap).to(dtype)[:, :columns],
            "adapters": adapters,
            "places": places,
            "slots": torch.tensor(slots, dtype=torch.int64),
            "ends": ends,
        }

    return Case(
        f"{len(slots)} tokens, {len(set(slots))} adapters, {columns} to {'+'.join(map(str, sizes))}", make, target
    )


def _cost(arguments: Arguments) -> Cost:
    """Count A and B of the adapters in use, x once, and y twice."""
    x, y, places, slots, ends = (arguments[name] for name in ("x", "y", "places", "slots", "ends"))
    ranks = places[..., 2]
    outputs = torch.tensor([end - begin for begin, end in zip((0, *ends), ends, strict=False)])
    values = (ranks * (x.shape[1] + outputs)).sum(1)  # of A and B, by slot
    used = [slot for slot in slots.tolist() if slot >= 0]
    read = sum(int(values[slot]) for slot in set(used)) * x.element_size()
    return Cost(read + size(x) + 2 * size(y), 2 * sum(int(values[slot]) for slot in used))


_EACH = tuple(range(16))
# Tolerance: in the storage type, the rounding of y; in fp32, the roundings of two consecutive sums of hundreds of terms.
ADD_LORA = Operation(
    name="add_lora",
    function=lora.add_lora,
    reference=_added,
    roundings=2,
    arithmetic=4,
    changes=("y",),
    cases=(
        _case((0,), (8,), (5,), 6),
        _case((1, -1, 0, 1), (8, 64), (42, 70, 3), 123, without=((1, 1),)),
        _case((-1, -1, -1), (8,), (20,), 30),
        _case((2, 2, 0, -1, 1, 1, 1, 1, 1, 1, 1), (16, 32, 8), (70, 33), 431, gap=5),
        _case((0,) * 40 + (1,) * 37 + (-1,) * 5, (16, 8), (131,), 66, gap=1),
        _case((), (8,), (64,), 64),
    ),
    bench=(
        _case(_EACH, (16,) * 16, (2048, 1024, 1024), 1024, Target(0.6, "read")),
        _case(_EACH, (16,) * 16, (1024,), 4096, Target(0.6, "read")),
        _case((0,) * 512, (16,), (4096, 4096), 1024),
    ),
    cost=_cost,
)
OPERATIONS = (ADD_LORA,)

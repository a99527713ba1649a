"""The catalogue's entry of pooling of hidden states."""

import torch
from torch import Tensor

from load_tests.catalogue.operation import Arguments, Case, Cost, Operation, Target, size
from pilotlight.kernels.pooling import Pooled, pool_pieces


def _pieces(lens: tuple[int, ...], columns: int, kind: Pooled, gap: int = 0) -> Case:
    """Make a case. `gap`: padding columns between two rows."""

    def make(dtype: torch.dtype) -> Arguments:
        starts = torch.tensor([0, *lens]).cumsum(0).int()
        hidden = torch.randn(sum(lens), columns + gap).to(dtype)[:, :columns]
        return {"hidden": hidden, "starts": starts, "host_lens": lens, "kind": kind}

    return Case(f"{kind} of {len(lens)} x {columns}, {sum(lens)} tokens", make, Target(0.85, "read"))


def _pooled(hidden: Tensor, starts: Tensor, host_lens: tuple[int, ...], kind: Pooled) -> Tensor:
    vectors = [
        {"sum": piece.sum(0), "first": piece[0], "last": piece[-1]}[kind]
        for piece in torch.split(hidden, list(host_lens))
    ]
    return torch.stack(vectors)


POOL = Operation(
    name="pool_pieces",
    function=pool_pieces,
    reference=_pooled,
    roundings=4,  # those of the fp32 sum; 16-bit types add none, because the result is fp32
    cases=tuple(
        _pieces(lens, columns, kind, gap)
        for kind in ("sum", "first", "last")
        for lens, columns, gap in (((1,), 1, 0), ((3, 1, 70), 42, 3), ((40, 33), 131, 0))
    ),
    bench=(_pieces((512,) * 16, 4096, "sum"), _pieces((8192,), 4096, "sum")),
    cost=lambda arguments: Cost(
        size(arguments["hidden"]) + 4 * len(arguments["host_lens"]) * arguments["hidden"].shape[1]
    ),
)
OPERATIONS = (POOL,)

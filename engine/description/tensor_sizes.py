"""The tensors of a model as implied by its config.json: sizes, division among ranks, use in a step.

The same tables as the families' loaders request, without torch and without a checkpoint. Does not know bytes (engine/planning).
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotlight.engine.description.shapes import ExpertsShape
from pilotlight.engine.weights.shard import Split

Part = Literal["embedding", "attention", "dense", "router", "experts", "shared_experts", "norms", "head", "vision"]
VOCABULARY_UNIT = 64  # a rank's rows of a vocabulary are a multiple of this
GATED_PARTS = ("gate_proj", "up_proj", "down_proj")  # the names in most checkpoints


class WeightShape(NamedTuple):
    """One tensor, or one per expert."""

    part: Part
    name: str  # in the checkpoint; for experts the first one's
    rows: int
    columns: int = 0  # 0 for a vector, which no format packs
    split: Split | None = None  # how ranks share it; None if each has all of it
    unit: int = 1  # rows or columns that stay together
    may_repeat: bool = False  # several ranks hold the same rows if there are fewer units than ranks
    experts: int = 0  # 0 if it belongs to no expert
    active: int = 1  # experts that compute a token
    is_sum: bool = False  # a bias of products that are summed: only the first rank has it
    is_wide: bool = False  # kept in fp32, independently of the others
    is_unpacked: bool = False  # kept plain in any format

    @property
    def numbers(self) -> int:
        return self.rows * max(1, self.columns) * max(1, self.experts)

    def num_read(self, tokens: int) -> float:
        """Return how many such matrices a step of `tokens` tokens reads, if all experts are equally likely."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 1.0

    @property
    def takes_adapters(self) -> bool:
        """True if adapters may change it: a layer's product in its stored form."""
        return self.columns > 0 and not (self.experts or self.is_wide or self.is_unpacked)


def projections(
    part: Part,
    names: Sequence[str],
    rows: Sequence[int],
    columns: int,
    *,
    bias: bool = False,
    unit: int = 1,
    repeats: bool = False,
) -> list[WeightShape]:
    """Return stacked projections whose rows ranks divide.

    Of several, or if it `repeats`, one with fewer units than ranks is held by several ranks.
    """
    repeats = repeats or len(names) > 1
    found = [WeightShape(part, name, n, columns, "rows", unit, repeats) for name, n in zip(names, rows, strict=True)]
    if bias:
        found += [
            WeightShape(part, f"{name}.bias", n, 0, "rows", unit, repeats) for name, n in zip(names, rows, strict=True)
        ]
    return found


def summed(part: Part, name: str, rows: int, columns: int, *, bias: bool = False, unit: int = 1) -> list[WeightShape]:
    """Return a projection whose columns ranks divide; their products are summed."""
    found = [WeightShape(part, name, rows, columns, "columns", unit)]
    return [*found, WeightShape(part, f"{name}.bias", rows, is_sum=True)] if bias else found


def gated(
    name: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
    part: Part = "dense",
    names: Sequence[str] = GATED_PARTS,
) -> list[WeightShape]:
    """Return a gated feed-forward."""
    gate, up, down = (f"{name}.{one}" for one in names)
    return [
        *projections(part, [gate, up], [intermediate_size] * 2, hidden_size, bias=bias),
        *summed(part, down, hidden_size, intermediate_size, bias=bias),
    ]


def experts(name: str, shape: ExpertsShape, top_k: int, names: Sequence[str] = GATED_PARTS) -> list[WeightShape]:
    """Return routed experts, each a gated feed-forward."""
    num_experts, hidden, intermediate = shape
    one = gated(f"{name}.0", hidden, intermediate, part="experts", names=names)
    return [weight._replace(experts=num_experts, active=top_k) for weight in one]


def router(name: str, num_experts: int, hidden_size: int, *, bias: bool = False) -> list[WeightShape]:
    found = [WeightShape("router", name, num_experts, hidden_size)]
    return [*found, WeightShape("router", f"{name}.bias", num_experts)] if bias else found


def norm(name: str, size: int, *, is_wide: bool = False) -> WeightShape:
    return WeightShape("norms", f"{name}.weight", size, is_wide=is_wide)


def embedding(part: Part, name: str, vocab_size: int, hidden_size: int) -> WeightShape:
    return WeightShape(part, name, vocab_size, hidden_size, "rows", VOCABULARY_UNIT)

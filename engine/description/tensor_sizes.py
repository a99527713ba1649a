"""The tensors of a model, derived from its config.json: sizes, division among ranks, use in a step.

They are the tensors that the model's loader requests, but computed without torch and without a checkpoint. Bytes are in engine/planning.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from pilotlight.engine.description.shapes import ExpertsShape
from pilotlight.engine.weights.shard import Split

Part = Literal[
    "embedding", "layer_inputs", "attention", "dense", "router", "experts", "shared_experts", "norms", "head", "vision"
]
VOCABULARY_UNIT = 64  # the number of a vocabulary's rows on a rank is a multiple of this
GATED_PARTS = ("gate_proj", "up_proj", "down_proj")  # names of the gate, up and down projection in most checkpoints
UNGATED_PARTS = ("up_proj", "down_proj")
XIELU_PARTS = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}  # shapes of xIELU's parameters, one number each


class WeightShape(NamedTuple):
    """The shape of a tensor, or of the tensors of all experts."""

    part: Part
    name: str  # name in the checkpoint; for experts that of the first expert
    rows: int
    columns: int = 0  # 0 for a vector, which no format packs
    split: Split | None = None  # how ranks divide it; None if each rank has all of it
    unit: int = 1  # number of consecutive rows or columns that are always on the same rank
    may_repeat: bool = False  # several ranks have the same rows if there are fewer units than ranks
    experts: int = 0  # number of experts; 0 if the tensor belongs to no expert
    active: int = 1  # number of experts that compute each token
    is_sum: bool = False  # a bias of products that ranks sum, so only the first rank has it
    is_wide: bool = False  # always in fp32
    is_unpacked: bool = False  # never packed by a storage format

    @property
    def numbers(self) -> int:
        return self.rows * max(1, self.columns) * max(1, self.experts)

    def num_read(self, tokens: int) -> float:
        """Return how many matrices a step of `tokens` tokens reads on average, if experts are equally likely."""
        return self.experts * (1 - (1 - self.active / self.experts) ** tokens) if self.experts else 1.0

    @property
    def takes_adapters(self) -> bool:
        """True if adapters may change the tensor: a matrix that belongs to no expert."""
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
    """Return stacked projections whose rows are divided among ranks.

    If a projection has fewer units than ranks, and is stacked with another one or `repeats` is set, several ranks have the same rows.
    """
    repeats = repeats or len(names) > 1
    found = [WeightShape(part, name, n, columns, "rows", unit, repeats) for name, n in zip(names, rows, strict=True)]
    if bias:
        found += [
            WeightShape(part, f"{name}.bias", n, 0, "rows", unit, repeats) for name, n in zip(names, rows, strict=True)
        ]
    return found


def summed(part: Part, name: str, rows: int, columns: int, *, bias: bool = False, unit: int = 1) -> list[WeightShape]:
    """Return a projection whose columns are divided among ranks, which sum their products."""
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
    """Return the tensors of a feed-forward.

    `names`: of its gate, if it has one, and of its up and down projection.
    """
    *ups, down = (f"{name}.{one}" for one in names)
    return [
        *projections(part, ups, [intermediate_size] * len(ups), hidden_size, bias=bias),
        *summed(part, down, hidden_size, intermediate_size, bias=bias),
    ]


def experts(name: str, shape: ExpertsShape, top_k: int, names: Sequence[str] = GATED_PARTS) -> list[WeightShape]:
    """Return the tensors of routed experts, each of which is a feed-forward."""
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

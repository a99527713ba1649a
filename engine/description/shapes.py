"""Sizes of a model's parts, as numbers alone: what its config.json describes and its layers are made by."""

from typing import NamedTuple


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    layer: int = 0  # whose cache it is, of those that a model has
    rotary: int | None = 0  # which of the model's rotary rules; None: nothing turns
    is_chunked: bool = False  # positions are cut into chunks of a window's length, and a query sees its own chunk's


class ExpertsShape(NamedTuple):
    num_experts: int
    hidden_size: int
    intermediate_size: int


class LatentShape(NamedTuple):
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    num_heads: int
    query_rank: int | None  # None: queries are projected at once
    latent: int  # numbers of the vector that is key and value of all heads
    rotary: int  # of each head's query, and of the one key that all share
    key: int  # of each head's query and key besides
    value: int
    scale: float
    layer: int  # whose cache it is

    @property
    def query(self) -> int:
        return self.key + self.rotary


class GroupedRouting(NamedTuple):
    """The rule by which tokens choose experts by sigmoids, as kernels/moe.py's route_in_groups takes it."""

    top_k: int
    groups: int
    top_groups: int
    renormalise: bool
    scale: float


class NormKind(NamedTuple):
    eps: float
    offset: float = 0.0  # added to the stored weight: Gemma stores what is to be added to one
    is_added: bool = False  # in the file already


class ImageBytes(NamedTuple):
    """Memory of a device that images hold."""

    kept: int  # embeddings
    encoding: int  # at once, between two steps


NO_IMAGES = ImageBytes(0, 0)

"""Sizes of a model's parts, as numbers alone: what its config.json describes and its layers are made by."""

from typing import Literal, NamedTuple


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    layer: int = 0  # whose cache it is, of those that a model has
    rotary: int | None = 0  # which of the model's rotary rules; None: nothing turns
    is_chunked: bool = False  # positions are cut into chunks of a window's length, and a query sees its own chunk's
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    is_interleaved: bool = (
        False  # the two numbers of a pair that turns are neighbours; else they are half of what turns apart
    )
    turns_first: bool = False  # heads are normalised after they have turned
    is_tempered: bool = False  # queries are multiplied by what grows with their position
    has_sinks: bool = False  # a score more for each head, which takes weight and gives no value
    value_dim: int | None = None  # numbers of a head's value, where these are fewer than its key's
    value_scale: float = 1.0  # that values are multiplied with
    keys_are_values: bool = False  # values are what keys are made of, before these are normalised and turn
    is_gated: bool = False  # what a head gives is multiplied by the sigmoid of a projection as wide as its queries, which lies behind theirs
    value_eps: float | None = None  # by which values are normalised, without weights; None: they are not


class NormNames(NamedTuple):
    """Names that a checkpoint has for a layer's norms of hidden states. None: there is no norm at this place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


NORMS_BEFORE = NormNames()


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


class Routing(NamedTuple):
    """The rule by which tokens choose experts."""

    top_k: int
    renormalise: bool = False  # weights of the chosen ones are divided by their sum
    scale: float = 1.0  # of the weights
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1  # of which the best `top_groups` are left to choose from
    top_groups: int = 1
    group_best: int = 2  # experts by whose scores together groups are compared
    is_biased: bool = False  # a bias that balances experts is added to scores that choose, and not to those that weigh
    is_wide: bool = False  # logits and scores are computed in fp32 from weights in fp32


class ExpertNames(NamedTuple):
    """Names that a checkpoint has for the parts of a feed-forward of experts, behind the layer's."""

    mlp: str = "mlp"
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up and down of one expert
    shared: str = "shared_experts"
    shared_gate: str | None = (
        None  # a projection to one number, whose sigmoid weighs the shared expert; None: nothing does
    )


PLAIN_NAMES = ExpertNames()


class SparseShape(NamedTuple):
    """A feed-forward of experts, with one of `shared_size` channels that every token goes to; 0: there is none."""

    experts: ExpertsShape
    routing: Routing
    shared_size: int = 0
    names: ExpertNames = PLAIN_NAMES


class NormKind(NamedTuple):
    eps: float
    offset: float = 0.0  # added to the stored weight: Gemma stores what is to be added to one
    is_added: bool = False  # in the file already


class ImageBytes(NamedTuple):
    """Memory of a device that images hold."""

    kept: int  # embeddings
    encoding: int  # at once, between two steps


NO_IMAGES = ImageBytes(0, 0)

"""Sizes of a model's parts, as numbers, which config.json describes and layers use."""

from typing import Literal, NamedTuple


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # tokens that a query sees, itself included; None for all before it
    layer: int = 0  # number of its cache, among the model's
    rotary: int | None = 0  # index of the model's rotary rule; None for no rotation
    is_chunked: bool = False  # positions are cut into chunks of `window` tokens, and a query sees only its own chunk
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    is_interleaved: bool = (
        False  # the two numbers of a rotated pair are adjacent; else they are half of the rotated part apart
    )
    turns_first: bool = False  # heads are normalised after rotation
    is_tempered: bool = False  # queries are multiplied by a factor that grows with their position
    has_sinks: bool = False  # one extra score per head, which takes weight and adds no value
    value_dim: int | None = None  # size of a head's value, if smaller than its key's
    value_scale: float = 1.0  # factor of values
    keys_are_values: bool = False  # values are the keys before normalisation and rotation
    is_gated: bool = False  # a head's output is multiplied by the sigmoid of its gate, stored after its query
    value_eps: float | None = None  # epsilon of a norm of values without weights; None for no norm


class NormNames(NamedTuple):
    """A checkpoint's names of a layer's norms of hidden states; None if there is no norm at this place."""

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
    query_rank: int | None  # None if queries are projected directly
    latent: int  # size of the vector that is key and value of all heads
    rotary: int  # size of the rotated part of each head's query, and of the one key that all share
    key: int  # size of the other part of each head's query and key
    value: int
    scale: float
    layer: int  # number of its cache

    @property
    def query(self) -> int:
        return self.key + self.rotary


class Routing(NamedTuple):
    """The rule by which tokens choose experts."""

    top_k: int
    renormalise: bool = False  # weights of the chosen ones are divided by their sum
    scale: float = 1.0  # of the weights
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1  # only experts of the best `top_groups` can be chosen
    top_groups: int = 1
    group_best: int = 2  # number of experts whose summed scores rank a group
    is_biased: bool = False  # a bias that balances experts is added to scores for the choice, but not to weights
    is_wide: bool = False  # logits and scores are computed in fp32 with weights in fp32


class ExpertNames(NamedTuple):
    """A checkpoint's names of the parts of a feed-forward with experts, after the layer's name."""

    mlp: str = "mlp"
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")  # gate, up and down of one expert
    shared: str = "shared_experts"
    shared_gate: str | None = (
        None  # a projection to one number, whose sigmoid weighs the shared expert; None for no weight
    )


PLAIN_NAMES = ExpertNames()


class SparseShape(NamedTuple):
    """A feed-forward of experts, with a shared one of `shared_size` channels (0: none)."""

    experts: ExpertsShape
    routing: Routing
    shared_size: int = 0
    names: ExpertNames = PLAIN_NAMES


class NormKind(NamedTuple):
    eps: float
    offset: float = 0.0  # added to the stored weight: Gemma stores the difference to one
    is_added: bool = False  # in the file already


class ImageBytes(NamedTuple):
    """A device's memory for images."""

    kept: int  # embeddings
    encoding: int  # at once, between two steps


NO_IMAGES = ImageBytes(0, 0)

"""Shapes of a model's parts: the numbers from config.json that layers use."""

from typing import Literal, NamedTuple

# Most bytes of keys and values that are expanded from a context's vectors (engine/layers/mla/expanded_attention.py). In bf16 they suffice for 10,900
# tokens in 16 of DeepSeek-V3's heads. Every rank reserves this memory in addition to its cache.
EXPANDED_BYTES = 128 << 20


class AttentionShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # number of tokens that a query sees, itself included; None if unlimited
    layer: int = 0  # index of the cache that the layer reads, among the caches of the model
    rotary: int | None = 0  # index of the model's rotary rule; None for no rotation
    is_chunked: bool = False  # a query sees only its chunk of `window` positions
    soft_cap: float | None = None  # a score s becomes soft_cap * tanh(s / soft_cap)
    is_interleaved: bool = (
        False  # the two numbers of a rotated pair are adjacent; else they are half the rotated part apart
    )
    turns_first: bool = False  # heads are normalised after rotation
    is_tempered: bool = False  # queries are multiplied by a factor that grows with their position
    has_sinks: bool = False  # attention sinks: one extra score per head, which takes weight and adds no value
    value_dim: int | None = None  # size of a head's value if it is smaller than its key
    value_scale: float = 1.0  # factor of values
    keys_are_values: bool = False  # values are the keys before normalisation and rotation
    is_gated: bool = False  # a head's output is multiplied by the sigmoid of its gate, stored after its query
    value_eps: float | None = None  # epsilon of a norm of values without weights; None for no norm
    gate: "GateShape | None" = None  # gates of the heads' outputs from a separate projection
    is_shared: bool = False  # the cache is that of an earlier layer, and this layer has neither keys nor values
    sees_images_whole: bool = False  # an image's tokens attend to each other in both directions


class GateShape(NamedTuple):
    """A projection to gates, whose sigmoids multiply the outputs of attention's heads."""

    name: str  # name of the projection in the checkpoint, after that of the attention
    size: int  # number of gates per head: one for each number of its output, or one for all


class NormNames(NamedTuple):
    """Names of a layer's norms of hidden states in the checkpoint; None if there is no norm at a place."""

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_feed_forward: str | None = "post_attention_layernorm"
    after_feed_forward: str | None = None


NORMS_BEFORE = NormNames()


class LayerInputShape(NamedTuple):
    """The shape of the inputs that layers have besides hidden states (Gemma 4)."""

    vocab_size: int  # rows of the table of tokens
    size: int  # numbers of a token per layer
    pad_token: int  # the token whose row replaces those of images' tokens


class ExpertsShape(NamedTuple):
    num_experts: int
    hidden_size: int
    intermediate_size: int


class IndexShape(NamedTuple):
    """The shape of the index by which latent attention selects the keys that it reads (DeepSeek-V3.2)."""

    num_heads: int
    head_dim: int
    top_k: int  # number of keys that a token reads
    is_interleaved: bool = False  # as in AttentionShape
    is_shared: bool = False  # True if the layer has no index and reads what the last layer with one has selected


class LatentShape(NamedTuple):
    """The shape of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    num_heads: int
    query_rank: int | None  # None if queries are projected directly
    latent: int  # size of the vector that is key and value of all heads
    rotary: int  # size of the rotated part of each head's query, and of the rotated key that all heads share
    key: int  # size of the part of each head's query and key that is not rotated
    value: int
    scale: float
    layer: int  # index of the layer's cache among the caches of the model
    turns: bool = True  # False if nothing is rotated
    key_index: IndexShape | None = None  # None if a token reads all keys

    @property
    def query(self) -> int:
        return self.key + self.rotary


class Routing(NamedTuple):
    """The rule by which tokens choose experts."""

    top_k: int
    renormalise: bool = False  # the weights of the chosen experts are divided by their sum
    scale: float = 1.0  # factor of the weights
    scores: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1  # number of groups of experts; only experts of the best `top_groups` groups can be chosen
    top_groups: int = 1
    group_best: int = 2  # number of experts whose summed scores rank a group
    is_biased: bool = False  # a balancing bias is added to scores for the choice, but not for the weights
    is_wide: bool = False  # logits and scores are computed in fp32 with weights in fp32
    # Epsilon of a norm of the router's input; experts' weights are then scaled by numbers from the checkpoint. None for neither.
    norm_eps: float | None = None


class ExpertNames(NamedTuple):
    """Names of the parts of a feed-forward with experts in the checkpoint, after the layer's name."""

    mlp: str = "mlp"  # "" if the parts belong to the layer itself
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    experts: str = "experts"
    parts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # gate, if any, up and down projection of one expert
    shared: str = "shared_experts"
    shared_gate: str | None = (
        None  # a projection to one number, whose sigmoid is the shared expert's weight; None for a weight of 1
    )
    # Projections of tokens to a smaller size, on which the experts work, and back; used if the experts' hidden_size is not the model's.
    latent: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    # The weight of a norm of the router's input, and the factors of experts' weights.
    router_scales: tuple[str, str] = ("router.scale", "router.per_expert_scale")

    def inside(self, layer: str) -> str:
        """Return the name of the feed-forward of the layer `layer`."""
        return f"{layer}.{self.mlp}" if self.mlp else layer


PLAIN_NAMES = ExpertNames()


class ParallelNorms(NamedTuple):
    """Names of the norms of a dense feed-forward and of experts beside it (Gemma 4)."""

    before_dense: str = "pre_feedforward_layernorm"
    after_dense: str = "post_feedforward_layernorm_1"
    before_experts: str = "pre_feedforward_layernorm_2"
    after_experts: str = "post_feedforward_layernorm_2"


class SparseShape(NamedTuple):
    """A feed-forward of experts, with a shared expert of `shared_size` channels unless that is 0.

    `parallel`: names of norms if the layer also has a dense feed-forward, whose result is added; the layer then has no norm before both.
    """

    experts: ExpertsShape
    routing: Routing
    shared_size: int = 0
    names: ExpertNames = PLAIN_NAMES
    scale: float = 1.0  # factor of the sum of all experts
    parallel: ParallelNorms | None = None


class NormKind(NamedTuple):
    eps: float
    offset: float = 0.0  # added to the stored weight: Gemma stores the weight minus one
    is_added: bool = False  # the checkpoint already contains the sum
    # The mean is subtracted first, as in a LayerNorm without bias; norms of heads then have a weight for each head.
    is_centered: bool = False


class WholeImages(NamedTuple):
    """Images whose tokens attend to each other in both directions, so that one step computes them."""

    most_tokens: int  # most tokens of an image
    only_in_windows: bool = False  # they do so only in layers with a window


class ImageNeeds(NamedTuple):
    """The bytes of a device's memory, and the tokens of a step, that images need."""

    kept: int  # bytes of cached embeddings
    encoding: int  # bytes of temporary memory to encode images between two steps
    step_tokens: int = 0  # most tokens of an image that one step computes, although they exceed its limit


NO_IMAGES = ImageNeeds(0, 0)

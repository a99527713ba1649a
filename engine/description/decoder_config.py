"""The part of config.json that decoders share: sizes, layers and rotary rules.

This module reads the keys that families share, and refuses unsupported values by name. The files of families/ read the keys of one family.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.rotary_scaling import (
    RotaryRule,
    parse_rotary_rule,
    read_rotary_rule,
)
from pilotlight.engine.description.shapes import NO_IMAGES, AttentionShape, ImageNeeds, NormKind
from pilotlight.engine.description.tensor_sizes import WeightShape, embedding, norm, projections, summed
from pilotlight.engine.kv.pool.layout import CachedLayer, keys_and_values
from pilotlight.engine.weights.config import (
    architecture,
    flag,
    number,
    positive_int,
    quantization,
    quantization_method,
    refuse_unless,
)
from pilotlight.engine.weights.formats.weight_formats import FORMATS, OF_STACKS
from pilotlight.engine.weights.fused import FusedRows

LAYER_TYPES = ("full_attention", "sliding_attention")


class LayerKind(NamedTuple):
    """The properties of one layer's attention that may differ between layers."""

    window: int | None = None  # number of tokens that a query sees, itself included; None if unlimited
    rotary: int | None = 0  # index of the model's rotary rule; None for no rotation
    is_chunked: bool = False  # a query sees only its chunk of `window` positions
    # Values for layers that differ from the model:
    num_kv_heads: int | None = None
    head_dim: int | None = None
    has_sinks: bool = False  # attention sinks: one extra score per head, which takes weight and adds no value
    keys_are_values: bool = False  # values are the keys before normalisation and rotation
    source: int | None = None  # an earlier layer, whose cached keys and values this layer reads; None for its own


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm: NormKind
    tied: bool
    rotary: tuple[RotaryRule, ...]
    layers: tuple[LayerKind, ...]
    attention_scale: float  # factor of the dot product of query and key
    # False if weights are reordered or scaled in the checkpoint, as in some GGUF files, so that adapters of the original do not match.
    takes_adapters: bool = True
    # Pattern of the names of tensors of the model's other parts, such as towers for images or sound. Those that are not loaded are skipped.
    beside: str = ""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        shapes = [self.attention(i) for i in range(self.num_layers)]
        return tuple(
            CachedLayer(())
            if shape.is_shared
            else CachedLayer(keys_and_values(shape.num_kv_heads, shape.head_dim), shape.window)
            for shape in shapes
        )

    def attention_products(self, context: int) -> int:
        """Return the number of multiplications of a token's attention in a layer.

        Each head multiplies a query with each key, and each value with its weight.
        """
        return 2 * self.num_heads * self.head_dim * context

    def read_share(self, context: int) -> float:
        """Return the bytes that a token reads, as a share of the cached bytes of a context."""
        shapes = [self.attention(i) for i in range(self.num_layers)]
        read = [shape.num_kv_heads * shape.head_dim * min(context, shape.window or context) for shape in shapes]
        return sum(read) / sum(size for size, shape in zip(read, shapes, strict=True) if not shape.is_shared)

    @property
    def rotary_numbers(self) -> int:
        """The number of fp32 values per position in the rotary tables."""
        return sum(rule.turning(dim) for rule, dim in zip(self.rotary, self.rotary_dims, strict=True))

    @property
    def rotary_dims(self) -> list[int]:
        """The size of the heads that each rotary rule rotates."""
        found = {kind.rotary: kind.head_dim or self.head_dim for kind in self.layers}
        return [found.get(i, self.head_dim) for i in range(len(self.rotary))]

    @property
    def fused(self) -> tuple[FusedRows, ...]:
        """The tensors of a checkpoint that contain several of the model's matrices."""
        return ()

    def check_stage(self, layers: range) -> None:
        """Raise CheckpointError if these layers cannot be a pipeline stage."""
        for i in layers:
            source = self.layers[i].source
            if source is not None and source not in layers:
                raise CheckpointError(
                    f"layer {i} reads the keys and values of layer {source}, which is in another pipeline stage: use fewer stages"
                )

    def step_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Return the bytes that a step of `tokens` tokens needs besides hidden states and projections."""
        return 0

    def image_needs(self, item_bytes: int) -> ImageNeeds:
        """Return what images need."""
        return NO_IMAGES

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        """Return the tensors of a layer whose names start with `name`."""
        raise NotImplementedError

    @property
    def outer_weights(self) -> list[WeightShape]:
        """The tensors outside the layers."""
        return self.text_weights

    @property
    def text_weights(self) -> list[WeightShape]:
        hidden, wide = self.hidden_size, bool(self.norm.offset)
        found = [
            embedding("embedding", "model.embed_tokens", self.vocab_size, hidden),
            norm("model.norm", hidden, is_wide=wide),
        ]
        return found if self.tied else [*found, embedding("head", "lm_head", self.vocab_size, hidden)]

    def attention_weights(
        self,
        name: str,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm: bool = False,
        num_norms: int = 2,
        shape: AttentionShape | None = None,
    ) -> list[WeightShape]:
        """Return the tensors of a layer's attention, and its norms of hidden states.

        `shape`: shape of the layer's attention; None for that of the first layer.
        """
        shape = shape or self.attention(0)
        heads, kv_heads, dim = shape[:3]
        value, wide = shape.value_dim or dim, bool(self.norm.offset)
        sizes = {"q": heads * dim * (1 + shape.is_gated), "k": kv_heads * dim, "v": kv_heads * value}
        parts = "q" if shape.is_shared else "qk" if value < dim or shape.keys_are_values else "qkv"
        names, rows = [f"{name}.self_attn.{part}_proj" for part in parts], [sizes[part] for part in parts]
        found = [
            *projections("attention", names, rows, self.hidden_size, bias=qkv_bias, unit=dim),
            *summed("attention", f"{name}.self_attn.o_proj", self.hidden_size, heads * value, bias=o_bias, unit=value),
            *(norm(f"{name}.norm_{i}", self.hidden_size, is_wide=wide) for i in range(num_norms)),
        ]
        if shape.gate is not None:
            name_of_gate, size = f"{name}.self_attn.{shape.gate.name}", shape.gate.size
            found += projections("attention", [name_of_gate], [heads * size], self.hidden_size, unit=size)
        if value < dim:
            alone = [f"{name}.self_attn.v_proj"]
            found += projections(
                "attention", alone, [sizes["v"]], self.hidden_size, bias=qkv_bias, unit=value, repeats=True
            )
        if qk_norm:  # stored with a row per head, as the kernel reads them
            for part, size in (("q", heads * dim), ("k", sizes["k"]))[: len(parts)]:
                found.append(
                    WeightShape("norms", f"{name}.self_attn.{part}_norm", size, 0, "rows", dim, True, is_wide=wide)
                )
        if shape.has_sinks:
            found.append(WeightShape("attention", f"{name}.self_attn.sinks", heads, 0, "rows"))
        return found

    def attention(self, layer: int) -> AttentionShape:
        kind = self.layers[layer]
        return AttentionShape(
            self.num_heads,
            kind.num_kv_heads or self.num_kv_heads,
            kind.head_dim or self.head_dim,
            self.attention_scale,
            kind.window,
            layer if kind.source is None else kind.source,
            kind.rotary,
            kind.is_chunked,
            has_sinks=kind.has_sinks,
            keys_are_values=kind.keys_are_values,
            is_shared=kind.source is not None,
        )

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        *,
        layers: tuple[LayerKind, ...] | None = None,
        rotary: tuple[RotaryRule, ...] | None = None,
        activation_key: str = "hidden_act",
        allowed_activation: str = "silu",
        quantizations: Collection[str] | None = None,
        default_head_dim: int | None = None,
        default_eps: float = 1e-6,
        norm_offset: float = 0.0,
        is_centered: bool = False,
        attention_scale: float | None = None,
        default_tied: bool = False,
        **own: Any,
    ) -> Self:
        """Parse a config.json. `own`: the family's fields. Without `layers` all layers have full attention."""
        refuse_unless(config, activation_key, allowed_activation)
        method = quantization_method(config)
        if quantizations is None:
            quantizations = [name for name in FORMATS if name not in OF_STACKS]
        if method is not None and method not in quantizations:
            supported = ["float32", "float16", "bfloat16", *quantizations]
            raise CheckpointError(
                f"the checkpoint is quantized ({method}); supported for {architecture(config)} are {', '.join(supported)}"
            )
        heads, hidden = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
        kv_heads = positive_int(config, "num_key_value_heads", heads)
        head_dim = positive_int(config, "head_dim", default_head_dim or hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json has {heads} heads, {kv_heads} key-value heads and head_dim {head_dim}: "
                "heads must be a multiple of key-value heads, and head_dim even"
            )
        rotary = rotary or (read_rotary_rule(config),)
        for rule in rotary:
            rule.turning(head_dim)  # raises if the rotated numbers do not form pairs
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=positive_int(config, "max_position_embeddings"),
            norm=NormKind(
                number(config, "rms_norm_eps", default_eps),
                norm_offset,
                flag(config, "norm_offset_included", False),
                is_centered,
            ),
            tied=flag(config, "tie_word_embeddings", default_tied),
            rotary=rotary,
            layers=layers or (LayerKind(),) * positive_int(config, "num_hidden_layers"),
            attention_scale=head_dim**-0.5 if attention_scale is None else attention_scale,
            takes_adapters=flag(config, "takes_adapters", True),
            **own,
        )


def text_keys(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the decoder's part of a config.json: text_config if there is one, else all of it."""
    text = config.get("text_config")
    if not text:
        return config
    if not isinstance(text, dict):
        raise CheckpointError(f"config.json has text_config = {text!r}; it must be an object")
    whole = {"architectures": config.get("architectures"), "quantization_config": quantization(config)}
    # This key is outside text_config, because the output head belongs to the whole model.
    if config.get("tie_word_embeddings") is not None:
        whole["tie_word_embeddings"] = config["tie_word_embeddings"]
    return {**text, **whole}


def uniform_layers(config: Mapping[str, Any], window: int | None) -> tuple[LayerKind, ...]:
    return (LayerKind(window),) * positive_int(config, "num_hidden_layers")


def mixed_layers(
    config: Mapping[str, Any],
    window: int | None,
    default: tuple[str, ...],
    sliding_rotary: int | None = 0,
    full_rotary: int | None = 0,
) -> tuple[LayerKind, ...]:
    """Return the layers according to `layer_types`, or to `default` if an older checkpoint lacks that key."""
    num_layers = positive_int(config, "num_hidden_layers")
    types = config.get("layer_types") or default
    if len(types) != num_layers:
        raise CheckpointError(f"config.json has {len(types)} layer_types for num_hidden_layers = {num_layers}")
    for layer_type in types:
        if layer_type not in LAYER_TYPES:
            raise CheckpointError(
                f"config.json has a layer of type {layer_type!r}; supported are {', '.join(LAYER_TYPES)}"
            )
    return tuple(
        LayerKind(window, sliding_rotary) if layer_type == "sliding_attention" else LayerKind(rotary=full_rotary)
        for layer_type in types
    )


def layer_types_of(config: Mapping[str, Any], default: list[str], known: tuple[str, ...]) -> list[str]:
    """Return the type of each layer from config.json, or `default`. Raises CheckpointError."""
    num_layers, types = positive_int(config, "num_hidden_layers"), config.get("layer_types") or default
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(
            f"config.json has layer_types = {types!r}; for {architecture(config)} it must be a list of {num_layers}: {' or '.join(known)}"
        )
    return types


def every_nth(config: Mapping[str, Any], n: int) -> tuple[str, ...]:
    """Return layer types: full attention in every n-th layer, windows in the others; no windows if n is 0."""
    return tuple(
        "sliding_attention" if n and (i + 1) % n else "full_attention"
        for i in range(positive_int(config, "num_hidden_layers"))
    )


def rules_by_type(
    config: Mapping[str, Any], full_theta: float, sliding_theta: float, default_share: float = 1.0
) -> tuple[RotaryRule, RotaryRule]:
    """Return the rotary rules of layers with full attention, and of layers with a window.

    Newer checkpoints describe a rule for each type of layer; in older ones scaling applies only to full attention.
    """
    nested = config.get("rope_parameters") or {}
    if not isinstance(nested, dict) or not nested.keys() <= set(LAYER_TYPES):
        raise CheckpointError(
            f"config.json has rope_parameters = {nested!r}; for {architecture(config)} they must be an object per layer type, "
            f"{' and '.join(LAYER_TYPES)}"
        )
    full, sliding = nested.get("full_attention"), nested.get("sliding_attention")
    return (
        parse_rotary_rule(config, full or config.get("rope_scaling") or {}, full_theta, default_share),
        parse_rotary_rule(config, sliding or {}, sliding_theta, default_share),
    )


def sliding_window(config: Mapping[str, Any], default: int | None) -> int | None:
    value = config.get("sliding_window", default)
    return None if value is None else positive_int(config, "sliding_window", default)


def read_top_k(
    config: Mapping[str, Any], num_experts: int, default: int | None = 8, key: str = "num_experts_per_tok"
) -> int:
    top_k = positive_int(config, key, default)
    if top_k > num_experts:
        raise CheckpointError(f"config.json has {key} = {top_k} of {num_experts} experts")
    return top_k

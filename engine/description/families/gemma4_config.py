"""The config of Gemma 4 (text).

Layers with full attention have wider heads and rotate a part of their pairs; values are normalised. In the large models these layers have fewer
key-value heads, and values that equal their keys; one of them has experts beside each dense feed-forward. In the small models layers have inputs
besides hidden states, and the last layers read keys and values of earlier ones.
"""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import (
    LayerKind,
    every_nth,
    mixed_layers,
    read_top_k,
    rules_by_type,
    sliding_window,
    text_keys,
)
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import gemma_decoder, read_cap
from pilotlight.engine.description.shapes import (
    ExpertNames,
    ExpertsShape,
    LayerInputShape,
    NormNames,
    ParallelNorms,
    Routing,
    SparseShape,
)
from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.weights.config import flag, number, positive_int, refuse_unless, whole_number

_AROUND_PARALLEL = NormNames("input_layernorm", "post_attention_layernorm", None, "post_feedforward_layernorm")
# Defaults of keys under text_config that a config.json may omit.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_144, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}  # fmt: skip


def parse_config(config: Mapping[str, Any]) -> DenseConfig:
    text = {**_DEFAULTS, **text_keys(config)}
    refuse_unless(text, "use_bidirectional_attention", None, "vision")  # "vision" affects only tokens of images
    shares = flag(text, "attention_k_eq_v", False)
    types = list(text.get("layer_types") or every_nth(text, 6))
    types[-1] = "full_attention"
    layers = mixed_layers({**text, "layer_types": types}, sliding_window(text, 512), (), sliding_rotary=1)
    num_layers = len(layers)
    num_own = num_layers - whole_number(text, "num_kv_shared_layers", num_layers)  # layers with keys and values
    is_double = flag(text, "use_double_wide_mlp", False)
    has_experts = flag(text, "enable_moe_block", False)
    return gemma_decoder(
        text,
        SparseConfig if has_experts else DenseConfig,
        layers=_with_sources(
            [
                _with_own_heads(kind._replace(keys_are_values=shares), text, i) if kind.window is None else kind
                for i, kind in enumerate(layers)
            ],
            types,
            num_own,
        ),
        wide_layers=frozenset(range(num_own, num_layers) if is_double else ()),
        layer_inputs=_layer_inputs(text),
        rotary=rules_by_type(text, 1_000_000.0, 10_000.0),
        qk_norm=True,
        norms_values=True,
        scales_layers=True,
        norm_offset=0.0,
        attention_scale=1.0,
        logit_cap=read_cap(text, "final_logit_softcapping", None),
        **(_experts_beside_dense(text, num_layers) if has_experts else {}),
    )


def _with_sources(kinds: list[LayerKind], types: list[str], num_own: int) -> tuple[LayerKind, ...]:
    """Return the layers; those from `num_own` on read the cache of the last earlier one of their type."""
    sources = {types[i]: i for i in range(num_own)}
    if missing := set(types) - set(sources):
        raise CheckpointError(
            f"config.json has num_kv_shared_layers = {len(kinds) - num_own}, and no earlier layer of type {missing.pop()} has keys and values"
        )
    shared = [kinds[i := sources[kind]]._replace(source=i, keys_are_values=False) for kind in types[num_own:]]
    return (*kinds[:num_own], *shared)


def _layer_inputs(config: Mapping[str, Any]) -> LayerInputShape | None:
    """Return the shape of layers' inputs besides hidden states, or None if config.json has none."""
    if not config.get("hidden_size_per_layer_input"):
        return None
    vocab_size = positive_int(config, "vocab_size")
    rows = positive_int(config, "vocab_size_per_layer_input", 262_144)
    if rows < vocab_size:
        raise CheckpointError(
            f"config.json has vocab_size_per_layer_input = {rows}; it must be at least vocab_size, {vocab_size}"
        )
    size = positive_int(config, "hidden_size_per_layer_input")
    return LayerInputShape(rows, size, whole_number(config, "pad_token_id", rows - 1))


def _experts_beside_dense(config: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the fields that SparseConfig adds, for experts beside the dense feed-forward of every layer."""
    num_experts = positive_int(config, "num_experts")
    shape = ExpertsShape(
        num_experts, positive_int(config, "hidden_size"), positive_int(config, "moe_intermediate_size")
    )
    top_k = read_top_k(config, num_experts, None, "top_k_experts")
    routing = Routing(top_k, renormalise=True, norm_eps=number(config, "rms_norm_eps", 1e-6))
    names = ExpertNames(mlp="", router="router.proj")
    return {
        "norms": _AROUND_PARALLEL,
        "sparse": SparseShape(shape, routing, names=names, parallel=ParallelNorms()),
        "sparse_layers": frozenset(range(num_layers)),
    }


def _with_own_heads(kind: LayerKind, config: Mapping[str, Any], layer: int) -> LayerKind:
    """Return a layer of Gemma 4 that has full attention, with the heads of such layers.

    Published checkpoints describe these heads once; checkpoints that transformers writes describe them per layer.
    """
    head_dim, few = config.get("global_head_dim", 512), config.get("num_global_key_value_heads")
    listed = config.get("per_layer_config")
    if listed is not None:
        own: Mapping[str, Any] = next((each for number, each in listed.items() if int(number) == layer), {})
        head_dim, few = own.get("head_dim"), own.get("num_key_value_heads")
    elif not kind.keys_are_values:
        few = None
    sizes = {"head_dim": head_dim, "num_key_value_heads": few}
    wide, heads = (None if sizes[key] is None else positive_int(sizes, key) for key in sizes)
    return kind._replace(head_dim=wide, num_kv_heads=heads)

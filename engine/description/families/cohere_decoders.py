"""Cohere's families: in each layer attention and feed-forward have the same input, and one norm.

A family is a function here, which reads config.json with the defaults of transformers' configuration classes, and a row of config_registry.py.
"""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.decoder_config import (
    LayerKind,
    every_nth,
    mixed_layers,
    read_top_k,
    sliding_window,
)
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import ExpertsShape, NormNames, Routing, SparseShape
from pilotlight.engine.description.sparse_config import SparseConfig, layers_with_experts
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, refuse_unless, whole_number


def cohere(config: Mapping[str, Any]) -> DenseConfig:
    """Command R and R+, Aya 23 and Expanse: adjacent pairs are rotated; R+ normalises each head."""
    return DenseConfig.read(
        **_fields(config),
        is_centered=True,
        rotary=(read_rotary_rule(config, 500_000.0),),
        intermediate_size=positive_int(config, "intermediate_size"),
        qk_norm=flag(config, "use_qk_norm", False),
    )


def cohere2(config: Mapping[str, Any]) -> DenseConfig:
    """Command R7B and Command A: like Command R, with windows in three of four layers, which alone rotate."""
    default = every_nth(config, positive_int(config, "sliding_window_pattern", 4))
    return DenseConfig.read(
        **_fields({**config, "head_dim": None}),  # not read by transformers either
        is_centered=True,
        layers=_turning_in_windows(config, default),
        intermediate_size=positive_int(config, "intermediate_size"),
    )


def cohere2_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Cohere 2 MoE: Command A's layers, with experts in all but the first ones, and maybe a shared expert."""
    num_layers, num_experts = positive_int(config, "num_hidden_layers"), positive_int(config, "num_experts", 8)
    inner, shared = positive_int(config, "intermediate_size"), whole_number(config, "num_shared_experts", num_experts)
    refuse_unless(config, "expert_selection_fn", "softmax", "sigmoid")
    refuse_unless(config, "shared_expert_combination_strategy", "average", "sum")
    scores = config.get("expert_selection_fn", "softmax")
    renormalise = scores == "softmax" or flag(config, "norm_topk_prob", True)
    averages = shared > 0 and config.get("shared_expert_combination_strategy", "average") == "average"
    has_centered_norms, eps = config.get("rms_norm_eps") is None, number(config, "layer_norm_eps", 1e-5)
    sparse_layers = layers_with_experts(config, num_layers)
    prefix = positive_int(config, "prefix_dense_sliding_window_pattern", 1)
    layers = _turning_in_windows(config, _types_with_prefix(config, prefix, num_layers))
    if prefix == 1:  # layers without experts rotate even if they have no window
        layers = tuple(kind if i in sparse_layers else kind._replace(rotary=0) for i, kind in enumerate(layers))
    fields = _fields(config) | {"config": {**config, "rms_norm_eps": number(config, "rms_norm_eps", eps)}}
    return SparseConfig.read(
        **fields,
        is_centered=has_centered_norms,
        default_head_dim=128,
        layers=layers,
        intermediate_size=positive_int(config, "prefix_dense_intermediate_size", inner),
        sparse=SparseShape(
            ExpertsShape(num_experts, positive_int(config, "hidden_size"), inner),
            Routing(read_top_k(config, num_experts, 2), renormalise, scores=scores),
            shared * inner,
            scale=0.5 if averages else 1.0,
        ),
        sparse_layers=sparse_layers,
    )


def _fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the families share."""
    bias = flag(config, "attention_bias", False)
    return {
        "config": {**config, "rms_norm_eps": number(config, "layer_norm_eps", 1e-5)},
        "default_tied": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "norms": NormNames(before_feed_forward=None),
        "is_parallel": True,
        "is_interleaved": True,
        "logit_scale": positive_number(config, "logit_scale", 0.0625),
    }


def _turning_in_windows(config: Mapping[str, Any], default: tuple[str, ...]) -> tuple[LayerKind, ...]:
    """Return the layers, of which those with a window rotate.

    `default`: their types if config.json has none.
    """
    window = sliding_window(config, 4096)
    return mixed_layers(config, window, default, sliding_rotary=None if window is None else 0, full_rotary=None)


def _types_with_prefix(config: Mapping[str, Any], prefix: int, num_layers: int) -> tuple[str, ...]:
    """Return the default types of layers.

    Of the first, dense layers every `prefix`-th has full attention.
    """
    dense = whole_number(config, "first_k_dense_replace", num_layers)
    period = positive_int(config, "sliding_window_pattern", 4)
    places = [(i, prefix) for i in range(dense)] + [(i, period) for i in range(num_layers - dense)]
    return tuple("sliding_attention" if (i + 1) % n else "full_attention" for i, n in places)

"""Liquid's LFM2 and LFM3: short convolutions in most layers, and attention in the others.

A family is a function here, which reads config.json with the defaults of transformers' configuration classes, and a row of config_registry.py.
"""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.description.decoder_config import (
    LAYER_TYPES,
    LayerKind,
    layer_types_of,
    mixed_layers,
    read_top_k,
    rules_by_type,
    sliding_window,
)
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.recurrent_shapes import ShortConvShape
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import (
    ExpertNames,
    ExpertsShape,
    GateShape,
    NormNames,
    Routing,
    SparseShape,
)
from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.weights.config import (
    flag,
    number,
    positive_int,
    positive_number,
    refuse_unless,
    whole_number,
)
from pilotlight.engine.weights.fused import FusedRows

_LFM2_NORMS = NormNames("operator_norm", None, "ffn_norm", None)
_LFM3_NORMS = NormNames("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
_LFM2_EXPERTS = ExpertNames(mlp="feed_forward", bias="expert_bias", parts=("w1", "w3", "w2"))


def lfm2(config: Mapping[str, Any]) -> DenseConfig:
    """LFM2: short convolutions between two gates in most layers, and attention in the others."""
    inner = positive_int(config, "block_ff_dim", positive_int(config, "intermediate_size", 12288))
    if flag(config, "block_auto_adjust_ff_dim", True):
        inner = int(positive_number(config, "block_ffn_dim_multiplier", 1.0) * int(2 * inner / 3))
        multiple = positive_int(config, "block_multiple_of", 256)
        inner = -(-inner // multiple) * multiple
    return DenseConfig.read(**_lfm2_fields(config, inner), intermediate_size=inner)


def lfm2_moe(config: Mapping[str, Any]) -> SparseConfig:
    """LFM2 MoE: LFM2's layers, with experts in all but the first layers."""
    inner, num_layers = positive_int(config, "intermediate_size", 7168), positive_int(config, "num_hidden_layers")
    num_experts = positive_int(config, "num_experts", 32)
    shape = ExpertsShape(
        num_experts, positive_int(config, "hidden_size"), positive_int(config, "moe_intermediate_size", 1792)
    )
    routing = Routing(
        read_top_k(config, num_experts, 4),
        flag(config, "norm_topk_prob", True),
        positive_number(config, "routed_scaling_factor", 1.0),
        "sigmoid",
        is_biased=True,
        is_wide=True,
    )
    refuse_unless(config, "use_expert_bias", True)
    return SparseConfig.read(
        **_lfm2_fields(config, inner),
        intermediate_size=inner,
        sparse=SparseShape(shape, routing, names=_LFM2_EXPERTS),
        sparse_layers=frozenset(
            range(whole_number({"num_dense_layers": 2, **config}, "num_dense_layers", num_layers), num_layers)
        ),
    )


def _lfm2_fields(
    config: Mapping[str, Any], inner: int, known: tuple[str, ...] = ("conv", "full_attention")
) -> dict[str, Any]:
    """Return the fields that LFM2 and its successors share.

    `inner`: inner size of a dense feed-forward; `known`: the supported types of layers.
    """
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    dim = positive_int(config, "head_dim", hidden // heads)
    width, bias = positive_int(config, "conv_L_cache", 3), flag(config, "conv_bias", False)
    types = layer_types_of(config, _lfm2_types(config), known)
    named = {
        "feed_forward.w1": ("mlp.gate_proj", inner),
        "feed_forward.w3": ("mlp.up_proj", inner),
        "feed_forward.w2": ("mlp.down_proj", hidden),
        "self_attn.out_proj": ("self_attn.o_proj", hidden),
        "q_layernorm": ("q_norm", dim),
        "k_layernorm": ("k_norm", dim),
        "embedding_norm": ("norm", hidden),
    }
    return {
        "config": {**config, "rms_norm_eps": number(config, "norm_eps", 1e-5)},
        "rotary": (read_rotary_rule(config, 1_000_000.0),),
        "layers": (LayerKind(),) * len(types),
        "default_tied": flag(config, "tie_embedding", True),
        "qk_norm": True,
        "norms": _LFM2_NORMS,
        "divided": tuple([FusedRows(name, {part: rows}) for name, (part, rows) in named.items()]),
        "recurrent": tuple(
            [ShortConvShape("conv", i, hidden, width, bias) if kind == "conv" else None for i, kind in enumerate(types)]
        ),
    }


def lfm3(config: Mapping[str, Any]) -> DenseConfig:
    """LFM3: LFM2's layers with norms after each part, some windows, and a gate on each head of attention.

    Layers with a window have a separate rotary rule.
    """
    inner, dim = positive_int(config, "intermediate_size", 7680), positive_int(config, "head_dim", 128)
    types = layer_types_of(config, _lfm3_types(config), ("conv", *LAYER_TYPES))
    attention = ["full_attention" if kind == "conv" else kind for kind in types]
    text = {"num_key_value_heads": 4, "conv_L_cache": 7, "rope_parameters": _LFM3_ROTARY, **config}
    bias, has_outer = flag(config, "attention_bias", False), flag(config, "use_sandwich_norm", True)
    fields = _lfm2_fields({**text, "head_dim": dim, "layer_types": types}, inner, ("conv", *LAYER_TYPES))
    return DenseConfig.read(
        **fields
        | {
            "layers": mixed_layers({**text, "layer_types": attention}, sliding_window(text, 256), (), sliding_rotary=1),
            "rotary": rules_by_type(text, 1_000_000.0, 10_000.0),
            "default_tied": True,
            "norms": _LFM3_NORMS if has_outer else _LFM2_NORMS,
        },
        intermediate_size=inner,
        qkv_bias=bias,
        o_bias=bias,
        gate=GateShape("gate_proj", 1) if flag(config, "use_attention_gate", True) else None,
    )


def _lfm3_types(config: Mapping[str, Any]) -> list[str]:
    period = ("sliding_attention", "conv", "full_attention", "conv")
    return ["conv" if i == 0 else period[i % 4] for i in range(positive_int(config, "num_hidden_layers"))]


_LFM3_ROTARY = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}


def _lfm2_types(config: Mapping[str, Any]) -> list[str]:
    num_layers = positive_int(config, "num_hidden_layers")
    indices = config.get("full_attn_idxs")
    full = range(num_layers) if indices is None else indices
    return ["full_attention" if i in full else "conv" for i in range(num_layers)]

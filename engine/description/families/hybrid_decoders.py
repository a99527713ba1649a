"""Families in which most layers keep a recurrent state instead of keys and values.

A family is a function here, which reads config.json with the defaults of transformers' configuration classes, and a row of config_registry.py.
A layer mixes tokens by one of the shapes of recurrent_shapes.py, or by attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import LayerKind, architecture, read_top_k, refuse_unless, text_keys
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import granite_scales
from pilotlight.engine.description.families.expert_decoders import (
    GRANITE_EXPERTS,
    QWEN2_EXPERTS,
    GraniteMoeConfig,
    every_step,
)
from pilotlight.engine.description.recurrent_shapes import DeltaShape, MambaShape, ShortConvShape
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import ExpertNames, ExpertsShape, NormNames, Routing, SparseShape
from pilotlight.engine.description.sparse_config import SparseConfig, read_softmax_experts
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, whole_number
from pilotlight.engine.weights.fused import FusedRows

_LFM2_NORMS = NormNames("operator_norm", None, "ffn_norm", None)
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


def _lfm2_fields(config: Mapping[str, Any], inner: int) -> dict[str, Any]:
    """Return the fields that LFM2 and LFM2 MoE share. `inner`: inner size of a dense feed-forward."""
    hidden, heads = positive_int(config, "hidden_size"), positive_int(config, "num_attention_heads")
    dim = positive_int(config, "head_dim", hidden // heads)
    width, bias = positive_int(config, "conv_L_cache", 3), flag(config, "conv_bias", False)
    types = _layer_types(config, _lfm2_types(config), ("conv", "full_attention"))
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


def qwen3_next(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen3-Next: three of four layers use the gated delta rule, the fourth gated attention.

    Layers with experts also have a shared expert.
    """
    return SparseConfig.read(
        **_qwen_fields(config, is_grouped=True),
        intermediate_size=positive_int(config, "intermediate_size", 5632),
        sparse=_qwen_experts(config, 512, 10, flag(config, "norm_topk_prob", True)),
        sparse_layers=every_step(config),
    )


def qwen3_5(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3.5 and 3.6 (text): Qwen3-Next's layers, with dense feed-forwards."""
    text = text_keys(config)
    return DenseConfig.read(
        **_qwen_fields(text, is_grouped=False), intermediate_size=positive_int(text, "intermediate_size", 12288)
    )


def qwen3_5_moe(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen 3.5 and 3.6 MoE (text): Qwen 3.5's layers, with experts."""
    text = text_keys(config)
    num_layers = positive_int(text, "num_hidden_layers")
    sparse = _qwen_experts(text, 256, 8, renormalise=True)
    return SparseConfig.read(
        **_qwen_fields(text, is_grouped=False),
        intermediate_size=sparse.experts.intermediate_size,
        sparse=sparse,
        sparse_layers=frozenset(range(num_layers)),
    )


def granite_hybrid(config: Mapping[str, Any]) -> DenseConfig:
    """Granite 4: Mamba-2 in most layers, attention in the others, and Granite 3's multipliers.

    Attention has no rotary embedding, unless position_embedding_type is "rope". Each layer has a dense feed-forward;
    larger models have experts as well.
    """
    shared, hidden = positive_int(config, "shared_intermediate_size", 1024), positive_int(config, "hidden_size")
    fields = {**_granite_fields(config), **granite_scales(config), "intermediate_size": shared}
    mlp = "block_sparse_moe.shared_mlp" if config.get("num_local_experts", 8) else "mlp"
    divided = (
        FusedRows("shared_mlp.input_linear", {f"{mlp}.gate_proj": shared, f"{mlp}.up_proj": shared}),
        FusedRows("shared_mlp.output_linear", {f"{mlp}.down_proj": hidden}),
    )
    if mlp == "mlp":
        return DenseConfig.read(**fields, divided=divided)
    return GraniteMoeConfig.read(
        **fields,
        divided=divided,
        sparse=read_softmax_experts(
            {"intermediate_size": 11008, **config},
            "num_local_experts",
            default_experts=8,
            default_top_k=2,
            renormalise=True,
            names=GRANITE_EXPERTS._replace(shared="shared_mlp"),
            shared_size=shared,
        ),
        sparse_layers=frozenset(range(positive_int(config, "num_hidden_layers"))),
    )


def _granite_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, hidden = positive_int(config, "num_hidden_layers"), positive_int(config, "hidden_size")
    refuse_unless(config, "position_embedding_type", None, "nope", "rope")
    if any(one not in (0.0, math.inf, None) for one in _limits(config)):
        raise CheckpointError(
            f"config.json has time_step_limit = {config['time_step_limit']!r}; limits of time steps are not supported"
        )
    types = _layer_types(config, ["mamba"] * num_layers, ("mamba", "linear_attention", "attention", "full_attention"))
    heads, inner = positive_int(config, "mamba_n_heads", 128), hidden * positive_int(config, "mamba_expand", 2)
    shape = MambaShape(
        "mamba",
        0,
        heads,
        inner // heads,
        positive_int(config, "mamba_d_state", 256),
        positive_int(config, "mamba_n_groups", 1),
        positive_int(config, "mamba_d_conv", 4),
        number(config, "rms_norm_eps", 1e-6),
        flag(config, "mamba_conv_bias", True),
        flag(config, "mamba_proj_bias", False),
    )
    if shape.inner != inner or heads % shape.groups or config.get("mamba_d_head") not in (None, "auto", shape.head_dim):
        raise CheckpointError(
            f"config.json has mamba_n_heads = {heads} in {shape.groups} groups for {inner} numbers, mamba_d_head = {config.get('mamba_d_head')!r}: "
            "heads must divide the numbers, and groups the heads"
        )
    bias, turns = flag(config, "attention_bias", False), config.get("position_embedding_type") == "rope"
    return {
        "config": config,
        "layers": (LayerKind(rotary=0 if turns else None),) * num_layers,
        "qkv_bias": bias,
        "o_bias": bias,
        "recurrent": tuple(
            [shape._replace(layer=i) if kind in ("mamba", "linear_attention") else None for i, kind in enumerate(types)]
        ),
    }


def _limits(config: Mapping[str, Any]) -> list[Any]:
    """Return the limits of a time step; transformers may write infinity as an object."""
    limits = config.get("time_step_limit") or []
    return [math.inf if one == {"__float__": "Infinity"} else one for one in limits]


def _qwen_experts(config: Mapping[str, Any], num_experts: int, top_k: int, renormalise: bool) -> SparseShape:
    return read_softmax_experts(
        {"moe_intermediate_size": 512, **config},
        "num_experts",
        size_key="moe_intermediate_size",
        default_experts=num_experts,
        default_top_k=top_k,
        renormalise=renormalise,
        names=QWEN2_EXPERTS,
        shared_size=positive_int(config, "shared_expert_intermediate_size", 512),
    )


def _qwen_fields(config: Mapping[str, Any], is_grouped: bool) -> dict[str, Any]:
    """Return the fields that Qwen3-Next and Qwen 3.5 share. `is_grouped`: see DeltaShape."""
    num_layers, every = positive_int(config, "num_hidden_layers"), positive_int(config, "full_attention_interval", 4)
    default = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    types = _layer_types(config, default, ("linear_attention", "full_attention"))
    bias = flag(config, "attention_bias", False)
    shape = DeltaShape(
        "linear_attn",
        0,
        positive_int(config, "linear_num_key_heads", 16),
        positive_int(config, "linear_num_value_heads", 32),
        positive_int(config, "linear_key_head_dim", 128),
        positive_int(config, "linear_value_head_dim", 128),
        positive_int(config, "linear_conv_kernel_dim", 4),
        number(config, "rms_norm_eps", 1e-6),
        is_grouped,
    )
    if shape.value_heads % shape.key_heads:
        raise CheckpointError(
            f"config.json has linear_num_value_heads = {shape.value_heads} for linear_num_key_heads = {shape.key_heads}; it must be a multiple"
        )
    return {
        "config": config,
        "rotary": (read_rotary_rule(config, default_share=0.25),),
        "layers": (LayerKind(),) * num_layers,
        "default_head_dim": 256,
        "norm_offset": 1.0,
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "is_gated": True,
        "recurrent": tuple(
            [shape._replace(layer=i) if kind == "linear_attention" else None for i, kind in enumerate(types)]
        ),
    }


def _lfm2_types(config: Mapping[str, Any]) -> list[str]:
    num_layers = positive_int(config, "num_hidden_layers")
    indices = config.get("full_attn_idxs")
    full = range(num_layers) if indices is None else indices
    return ["full_attention" if i in full else "conv" for i in range(num_layers)]


def _layer_types(config: Mapping[str, Any], default: list[str], known: tuple[str, ...]) -> list[str]:
    """Return the type of each layer from config.json, or `default`. Raises CheckpointError."""
    num_layers, types = positive_int(config, "num_hidden_layers"), config.get("layer_types") or default
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise CheckpointError(
            f"config.json has layer_types = {types!r}; for {architecture(config)} it must be a list of {num_layers}: {' or '.join(known)}"
        )
    return types

"""Families in which most layers keep a recurrent state instead of keys and values.

A family is a function here, which reads config.json with the defaults of transformers' configuration classes, and a row of config_registry.py.
A layer mixes tokens by one of the shapes of recurrent_shapes.py, or by attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import LayerKind, layer_types_of, text_keys
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import granite_scales
from pilotlight.engine.description.families.expert_decoders import (
    GRANITE_EXPERTS,
    QWEN2_EXPERTS,
    GraniteMoeConfig,
    every_step,
    granite_shared,
)
from pilotlight.engine.description.recurrent_shapes import DeltaShape, MambaShape
from pilotlight.engine.description.rotary_scaling import read_rotary_rule
from pilotlight.engine.description.shapes import (
    ExpertNames,
    NormNames,
    SparseShape,
)
from pilotlight.engine.description.sparse_config import SparseConfig, read_grouped_experts, read_softmax_experts
from pilotlight.engine.description.tensor_sizes import UNGATED_PARTS
from pilotlight.engine.weights.config import (
    flag,
    number,
    positive_int,
    refuse_unless,
)
from pilotlight.engine.weights.fused import FusedRows


def qwen3_next(config: Mapping[str, Any]) -> SparseConfig:
    """Qwen3-Next: three of four layers use the gated delta rule, the fourth gated attention.

    Layers with experts also have a shared expert.
    """
    return SparseConfig.read(
        **_qwen_fields(config, is_grouped=flag(config, "linear_projections_grouped", True)),
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
    divided = granite_shared(mlp, shared, hidden)
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


def nemotron_h(config: Mapping[str, Any]) -> DenseConfig:
    """Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer has one part.

    It is Mamba-2, attention, a feed-forward, or experts. Attention has no rotary embedding, feed-forwards no gate. Steps of Mamba-2 have no lower
    limit, as in the published code: transformers raises those of a prompt, but not of a decode, to time_step_min.
    """
    types = _nemotron_types(config)
    refuse_unless(config, "mamba_hidden_act", "silu")
    for key in ("mlp_bias", "attention_bias", "tie_word_embeddings"):  # transformers ignores the last two
        refuse_unless(config, key, False, None)
    refuse_unless(config, "sliding_window", None)
    _refuse_step_limits(config)
    sizes = {**_NEMOTRON_SIZES, **config, "num_hidden_layers": len(types), "num_nextn_predict_layers": 0}
    hidden, inner = positive_int(sizes, "hidden_size"), positive_int(sizes, "intermediate_size")
    dim, eps = positive_int(sizes, "head_dim"), number(config, "layer_norm_epsilon", 1e-5)
    rows = {"q": positive_int(sizes, "num_attention_heads") * dim, "o": hidden}
    rows |= dict.fromkeys("kv", positive_int(sizes, "num_key_value_heads") * dim)
    named = {
        "embeddings": ("embed_tokens", positive_int(sizes, "vocab_size")),
        "norm_f": ("norm", hidden),
        "mixer.up_proj": ("mlp.up_proj", inner),
        "mixer.down_proj": ("mlp.down_proj", hidden),
        **{f"mixer.{part}_proj": (f"self_attn.{part}_proj", n) for part, n in rows.items()},
    }
    mamba, fields = _nemotron_mamba(config, eps), _nemotron_experts(sizes, types)
    return (SparseConfig if fields else DenseConfig).read(
        {**sizes, "rms_norm_eps": eps},
        activation_key="mlp_hidden_act",
        allowed_activation="relu2",
        activation="relu2",
        layers=(LayerKind(rotary=None),) * len(types),
        intermediate_size=inner,
        norms=NormNames("norm", None, "norm", None),
        alone=tuple(["mixer" if one in ("mamba", "attention") else "feed_forward" for one in types]),
        divided=tuple([FusedRows(name, {part: rows}) for name, (part, rows) in named.items()]),
        recurrent=tuple([mamba._replace(layer=i) if one == "mamba" else None for i, one in enumerate(types)]),
        **fields,
    )


# The defaults of transformers' configuration class.
_NEMOTRON_SIZES = {
    "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 131072,
    "max_position_embeddings": 4096, "mlp_hidden_act": "relu2", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
}  # fmt: skip
_NEMOTRON_TYPES = {
    "M": "mamba", "E": "moe", "*": "attention", "-": "mlp", "linear_attention": "mamba", "full_attention": "attention"
}  # fmt: skip


def _nemotron_types(config: Mapping[str, Any]) -> list[str]:
    """Return the type of each layer.

    They are in a list, or in a pattern of one letter per layer. Raises CheckpointError.
    """
    given = config.get("layers_block_type") or config.get("layer_types") or config.get("hybrid_override_pattern")
    types = [_NEMOTRON_TYPES.get(one, one) for one in given or ()]
    if not types or not set(types) <= {"mamba", "moe", "attention", "mlp"}:
        raise CheckpointError(
            f"config.json has layers_block_type = {given!r}; its layers must be mamba, moe, attention or mlp, "
            "or letters of hybrid_override_pattern: M, E, * or -"
        )
    return types


def _nemotron_mamba(config: Mapping[str, Any], eps: float) -> MambaShape:
    heads, groups = positive_int(config, "mamba_num_heads", 128), positive_int(config, "n_groups", 8)
    if heads % groups:
        raise CheckpointError(
            f"config.json has mamba_num_heads = {heads}; it must be a multiple of n_groups = {groups}"
        )
    return MambaShape(
        "mixer",
        0,
        heads,
        positive_int(config, "mamba_head_dim", 64),
        positive_int(config, "ssm_state_size", 128),
        groups,
        positive_int(config, "conv_kernel", 4),
        eps,
        flag(config, "use_conv_bias", True),
        flag(config, "use_bias", False),
    )


def _nemotron_experts(sizes: Mapping[str, Any], types: list[str]) -> dict[str, Any]:
    """Return the fields of layers with experts, or none without such layers.

    Experts may work on a projection of the token.
    """
    if "moe" not in types:
        return {}
    kinds = ["sparse" if one == "moe" else "dense" for one in types]
    fields = read_grouped_experts({**sizes, "mlp_layer_types": kinds})
    sparse, narrow = fields["sparse"], sizes.get("moe_latent_size")
    size = sparse.experts.hidden_size if narrow is None else positive_int(sizes, "moe_latent_size")
    shared = positive_int(sizes, "moe_shared_expert_intermediate_size", 7688)
    return {
        "sparse": sparse._replace(
            experts=sparse.experts._replace(hidden_size=size),
            shared_size=shared,
            names=ExpertNames(mlp="mixer", parts=UNGATED_PARTS),
        ),
        "sparse_layers": fields["sparse_layers"],
    }


def falcon_h1(config: Mapping[str, Any]) -> DenseConfig:
    """Falcon-H1: every layer adds the outputs of attention and Mamba-2, with a multiplier at each seam."""
    num_layers, hidden = positive_int(config, "num_hidden_layers", 32), positive_int(config, "hidden_size", 4096)
    inner, heads = positive_int(config, "intermediate_size", 14336), positive_int(config, "num_attention_heads", 32)
    refuse_unless(config, "mlp_bias", False, None)
    refuse_unless(config, "projectors_bias", flag(config, "mamba_proj_bias", False), None)
    _refuse_step_limits(config)
    mamba = _falcon_mamba(config, hidden)
    bias, dim = flag(config, "attention_bias", False), positive_int(config, "head_dim", hidden // heads)
    gate_scale, down_scale = _multipliers(config, "mlp_multipliers", 2)
    attention_in, attention_out, mamba_in, mamba_out = (
        number(config, f"{part}_{side}_multiplier", 1.0) for part in ("attention", "ssm") for side in ("in", "out")
    )
    named = {f"feed_forward.{part}_proj": (f"mlp.{part}_proj", inner) for part in ("gate", "up")}
    named |= {"feed_forward.down_proj": ("mlp.down_proj", hidden), "final_layernorm": ("norm", hidden)}
    return DenseConfig.read(
        {"num_key_value_heads": 8, "max_position_embeddings": 8192, "vocab_size": 128000, **config},
        layers=(LayerKind(),) * num_layers,
        default_eps=1e-5,
        attention_scale=dim**-0.5 * number(config, "key_multiplier", 1.0),
        intermediate_size=inner,
        qkv_bias=bias,
        o_bias=bias,
        norms=NormNames("input_layernorm", None, "pre_ff_layernorm", None),
        embedding_scale=number(config, "embedding_multiplier", 1.0),
        logit_scale=number(config, "lm_head_multiplier", 1.0),
        feed_forward_scales=(gate_scale, down_scale),
        divided=tuple([FusedRows(name, {part: rows}) for name, (part, rows) in named.items()]),
        recurrent=tuple([mamba._replace(layer=num_layers + i) for i in range(num_layers)]),
        joined=(attention_in, attention_out, mamba_in, mamba_out),
    )


def _falcon_mamba(config: Mapping[str, Any], hidden: int) -> MambaShape:
    expanded = positive_int(config, "mamba_expand", 2) * hidden
    is_expanded = "mamba_d_ssm" in config and config["mamba_d_ssm"] is None
    inner = expanded if is_expanded else positive_int(config, "mamba_d_ssm", 1024)
    scales = _multipliers(config, "ssm_multipliers", 5)
    return _mamba(
        {"rms_norm_eps": 1e-5, **config},
        inner,
        has_norm=flag(config, "mamba_rms_norm", False),
        gates_first=not flag(config, "mamba_norm_before_gate", True),
        scales=() if set(scales) == {1.0} else scales,
    )


def _multipliers(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    given = config.get(key) or [1.0] * count
    if len(given) != count:
        raise CheckpointError(f"config.json has {key} = {given!r}; it must be a list of {count} numbers")
    return tuple([number({key: one}, key) for one in given])


def _mamba(config: Mapping[str, Any], inner: int, **own: Any) -> MambaShape:
    """Read Granite's and Falcon's keys of Mamba-2.

    `inner`: size of the inputs of all heads. Raises CheckpointError.
    """
    heads = positive_int(config, "mamba_n_heads", 128)
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
        **own,
    )
    if shape.inner != inner or heads % shape.groups or config.get("mamba_d_head") not in (None, "auto", shape.head_dim):
        raise CheckpointError(
            f"config.json has mamba_n_heads = {heads} in {shape.groups} groups for {inner} numbers, mamba_d_head = {config.get('mamba_d_head')!r}: "
            "heads must divide the numbers, and groups the heads"
        )
    return shape


def _granite_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    num_layers, hidden = positive_int(config, "num_hidden_layers"), positive_int(config, "hidden_size")
    refuse_unless(config, "position_embedding_type", None, "nope", "rope")
    _refuse_step_limits(config)
    types = layer_types_of(config, ["mamba"] * num_layers, ("mamba", "linear_attention", "attention", "full_attention"))
    shape = _mamba(config, hidden * positive_int(config, "mamba_expand", 2))
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


def _refuse_step_limits(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the steps of Mamba-2 have limits.

    transformers may write infinity as an object.
    """
    if any(one not in (0.0, math.inf, None, {"__float__": "Infinity"}) for one in config.get("time_step_limit") or []):
        raise CheckpointError(
            f"config.json has time_step_limit = {config['time_step_limit']!r}; limits of time steps are not supported"
        )


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
    """Return the fields that Qwen3-Next and Qwen 3.5 share. `is_grouped`: see DeltaShape.

    engine/gguf writes two keys for files of llama.cpp, whose order of rows differs from that of checkpoints.
    """
    num_layers, every = positive_int(config, "num_hidden_layers"), positive_int(config, "full_attention_interval", 4)
    default = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    types = layer_types_of(config, default, ("linear_attention", "full_attention"))
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
        flag(config, "linear_value_heads_tiled", False),
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

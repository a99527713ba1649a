"""The families of GGUF files in which most layers keep a state instead of keys and values.

How llama.cpp's converter changes values is from its conversion/qwen.py, lfm2.py, mamba.py, granite.py, nemotron.py, falcon_h1.py and kimi_linear.py
(https://github.com/ggml-org/llama.cpp); constants that files do not contain are from its src/models. The converter reorders the value heads of
Qwen 3.5, and multiplies weights of Falcon-H1: the model is computed with these heads and weights, since codes cannot be reordered within a block.
"""

import math
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.decoders import GRANITE_MOE_LAYERS, QWEN2_MOE_LAYERS, dense, granite, qwen2_moe
from pilotlight.engine.gguf.family import LAYERS, GgufFamily, GgufHeader, NamedTensor, norm_eps, num_layers
from pilotlight.engine.gguf.mla import LATENT_LAYERS, latent

_SIGMOID = 2  # llama.cpp's number of the function that scores experts


def _state_layers(mixer: str) -> dict[str, str]:
    """Return the names of the tensors that Mamba-2 and the gated delta rule share."""
    names = {"in": "in_proj", "conv1d": "conv1d", "dt": "dt_bias", "a": "A_log", "d": "D", "norm": "norm", "out": "out_proj"}  # fmt: skip
    return {f"ssm_{part}": f"{mixer}.{name}" for part, name in names.items()}


_LFM2_LAYERS = LAYERS | {
    "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "shortconv.conv": "conv.conv", "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj", "ffn_gate_inp": "feed_forward.gate", "exp_probs_b": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.w1", "ffn_up_exps": "feed_forward.experts.w3", "ffn_down_exps": "feed_forward.experts.w2",
}  # fmt: skip
_QWEN_LAYERS = QWEN2_MOE_LAYERS | _state_layers("linear_attn") | {
    "post_attention_norm": "post_attention_layernorm", "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba", "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}  # fmt: skip
_GRANITE_LAYERS = GRANITE_MOE_LAYERS | _state_layers("mamba") | {
    "ffn_gate_shexp": "block_sparse_moe.shared_mlp.gate_proj", "ffn_up_shexp": "block_sparse_moe.shared_mlp.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_mlp.down_proj",
}  # fmt: skip
_FALCON_LAYERS = LAYERS | _state_layers("mamba") | {"ffn_norm": "pre_ff_layernorm"}
_NEMOTRON_LAYERS = LAYERS | _state_layers("mixer") | {
    "attn_norm": "norm", "ffn_gate_inp": "mixer.gate", "exp_probs_b": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.up_proj", "ffn_down_exps": "mixer.experts.down_proj", "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj", "ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj",
}  # fmt: skip
_KIMI_LAYERS = LATENT_LAYERS | _state_layers("self_attn") | {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj", "ssm_norm": "self_attn.o_norm", "ffn_gate_inp": "block_sparse_moe.gate",
    "exp_probs_b": "block_sparse_moe.gate.e_score_correction_bias", "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3", "ffn_down_exps": "block_sparse_moe.experts.w2",
    "ffn_gate_shexp": "block_sparse_moe.shared_experts.gate_proj", "ffn_up_shexp": "block_sparse_moe.shared_experts.up_proj",
    "ffn_down_shexp": "block_sparse_moe.shared_experts.down_proj",
}  # fmt: skip


def _lfm2(header: GgufHeader) -> dict[str, Any]:
    if header.integer("{arch}.attention.sliding_window", 0):
        raise CheckpointError(f"{header.origin} has windows, which are not supported for {header.architecture}")
    return {
        **dense(header),
        "block_auto_adjust_ff_dim": False,
        "layer_types": _types(header, "full_attention", "conv"),
        "conv_L_cache": header.integer("{arch}.shortconv.l_cache"),
        "norm_eps": norm_eps(header),
    }


def _types(header: GgufHeader, attention: str, state: str) -> list[str]:
    """Return the type of each layer, which has a state if it has no key-value heads."""
    heads = header.per_layer("{arch}.attention.head_count_kv", num_layers(header), least=0)
    return [attention if count else state for count in heads]


def _lfm2_moe(header: GgufHeader) -> dict[str, Any]:
    _require_sigmoids(header)
    return {
        **_lfm2(header),
        "num_dense_layers": header.integer("{arch}.leading_dense_block_count", 0),
        "num_experts": header.integer("{arch}.expert_count"),
        "num_experts_per_tok": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "routed_scaling_factor": header.number("{arch}.expert_weights_scale", 1.0),
    }


def _require_sigmoids(header: GgufHeader) -> None:
    function = header.integer("{arch}.expert_gating_func", _SIGMOID)
    if function != _SIGMOID:
        raise CheckpointError(
            f"{header.origin} has {header.architecture}.expert_gating_func = {function}; supported is {_SIGMOID}, sigmoids"
        )


def _qwen3_next(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Qwen3-Next.

    In files of 2025, rows of projections have the order of checkpoints.
    """
    return {
        **_delta(header),
        **qwen2_moe(header),
        "norm_topk_prob": True,  # as always in llama.cpp
        "linear_projections_grouped": _has(header, "ssm_in.weight"),
    }


def _qwen3_5(header: GgufHeader) -> dict[str, Any]:
    return {**_tiled_delta(header), **dense(header)}


def _qwen3_5_moe(header: GgufHeader) -> dict[str, Any]:
    return {**_tiled_delta(header), **qwen2_moe(header)}


def _tiled_delta(header: GgufHeader) -> dict[str, Any]:
    config = _delta(header)
    is_tiled = config["linear_num_value_heads"] != config["linear_num_key_heads"]
    return {**config, "linear_value_heads_tiled": is_tiled, "takes_adapters": not is_tiled}


def _delta(header: GgufHeader) -> dict[str, Any]:
    """Return the keys of the gated delta rule.

    Every fourth layer has attention, unless the file has another period or a list.
    """
    count, value_heads = num_layers(header), header.integer("{arch}.ssm.time_step_rank")
    every, key = header.integer("{arch}.full_attention_interval", 4), "{arch}.attention.recurrent_layers"
    by_period = [not every or (i + 1) % every != 0 for i in range(count)]
    have_states = header.flags(key)[:count] if key in header else by_period
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in have_states],
        "linear_num_key_heads": header.integer("{arch}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": header.integer("{arch}.ssm.state_size"),
        "linear_value_head_dim": _share(header, "{arch}.ssm.inner_size", value_heads),
        "linear_conv_kernel_dim": header.integer("{arch}.ssm.conv_kernel"),
        "norm_offset_included": True,
        "attention_bias": _has(header, "attn_q.bias"),
    }


def _has(header: GgufHeader, tensor: str) -> bool:
    """Return True if some layer has the tensor."""
    return any(name.endswith(f".{tensor}") for name in header.file.tensors)


def _share(header: GgufHeader, key: str, count: int) -> int:
    """Return the number at `key`, divided by `count`. Raises CheckpointError if it is no multiple."""
    total = header.integer(key)
    if not count or total % count:
        key = key.replace("{arch}", header.architecture)
        raise CheckpointError(f"{header.origin} has {key} = {total}; it must be a multiple of {count}")
    return total // count


def _granite_hybrid(header: GgufHeader) -> dict[str, Any]:
    if header.flag("{arch}.rope.scaling.finetuned", True):
        raise CheckpointError(
            f"{header.origin} rotates queries and keys, which is not supported for {header.architecture}"
        )
    inner = header.integer("{arch}.feed_forward_length")
    return {
        **granite(header),
        **_mamba(header),
        "mamba_expand": _share(header, "{arch}.ssm.inner_size", header.integer("{arch}.embedding_length")),
        "layer_types": _types(header, "attention", "mamba"),
        "partial_rotary_factor": 1.0,  # unused, as nothing is rotated
        "shared_intermediate_size": header.integer("{arch}.expert_shared_feed_forward_length", inner),
        "num_local_experts": header.integer("{arch}.expert_count", 0),
        "num_experts_per_tok": header.integer("{arch}.expert_used_count", 0),
    }


def _falcon_h1(header: GgufHeader) -> dict[str, Any]:
    return {
        **dense(header),
        **_mamba(header),
        "mamba_d_ssm": header.integer("{arch}.ssm.inner_size"),
        "mamba_rms_norm": _has(header, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as always in llama.cpp
        "takes_adapters": False,  # its weights include multipliers
    }


def _mamba(header: GgufHeader) -> dict[str, Any]:
    return {
        "mamba_n_heads": header.integer("{arch}.ssm.time_step_rank"),
        "mamba_d_state": header.integer("{arch}.ssm.state_size"),
        "mamba_n_groups": header.integer("{arch}.ssm.group_count"),
        "mamba_d_conv": header.integer("{arch}.ssm.conv_kernel"),
        "mamba_conv_bias": _has(header, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(header, "ssm_in.bias"),
        "attention_bias": _has(header, "attn_q.bias"),
    }


def _nemotron(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Nemotron-H, in which each layer has one part, known by its tensors."""
    heads, layers = header.integer("{arch}.ssm.time_step_rank"), range(num_layers(header))
    parts = {"ssm_in": "mamba", "attn_q": "attention", "ffn_gate_inp": "moe"}
    types = [next((parts[one] for one in parts if header.has(f"blk.{i}.{one}.weight")), "mlp") for i in layers]
    ups = [header.file.tensors.get(f"blk.{i}.ffn_up.weight") for i in layers]
    return {
        "layers_block_type": types,
        "partial_rotary_factor": 1.0,  # unused, as nothing is rotated
        "intermediate_size": max([up.shape[0] for up in ups if up is not None], default=1),
        "mamba_num_heads": heads,
        "mamba_head_dim": _share(header, "{arch}.ssm.inner_size", heads),
        "n_groups": header.integer("{arch}.ssm.group_count"),
        "ssm_state_size": header.integer("{arch}.ssm.state_size"),
        "conv_kernel": header.integer("{arch}.ssm.conv_kernel"),
        "use_conv_bias": _has(header, "ssm_conv1d.bias"),
        "use_bias": _has(header, "ssm_in.bias"),
        "layer_norm_epsilon": norm_eps(header),
    }


def _nemotron_moe(header: GgufHeader) -> dict[str, Any]:
    _require_sigmoids(header)
    latent = header.integer("{arch}.moe_latent_size", 0)
    return {
        **_nemotron(header),
        "n_routed_experts": header.integer("{arch}.expert_count"),
        "num_experts_per_tok": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": header.integer("{arch}.expert_shared_feed_forward_length"),
        "n_group": header.integer("{arch}.expert_group_count", 1),
        "topk_group": header.integer("{arch}.expert_group_used_count", 1),
        "norm_topk_prob": header.flag("{arch}.expert_weights_norm", False),
        "routed_scaling_factor": header.number("{arch}.expert_weights_scale", 1.0),
        **({"moe_latent_size": latent} if latent else {}),
    }


def _kimi_linear(header: GgufHeader) -> dict[str, Any]:
    _require_sigmoids(header)
    return {
        **latent(header),
        "layer_types": _types(header, "full_attention", "linear_attention"),
        "linear_num_heads": header.integer("{arch}.attention.head_count"),
        "linear_head_dim": header.integer("{arch}.kda.head_dim"),
        "linear_conv_kernel_dim": header.integer("{arch}.ssm.conv_kernel"),
        "n_group": header.integer("{arch}.expert_group_count", 1),
        "topk_group": header.integer("{arch}.expert_group_used_count", 1),
        "norm_topk_prob": True,  # as always in llama.cpp
    }


def _converted(header: GgufHeader, named: NamedTensor) -> Iterator[NamedTensor]:
    """Return a tensor as checkpoints have it: decays as logarithms, and all dimensions of its shape."""
    name, stored = named.name, named.tensor
    if name.endswith(".A_log"):
        count = math.prod(stored.shape)
        shape = (1, 1, count, 1) if name.endswith("self_attn.A_log") else (count,)  # Kimi Linear's or others'
        yield named._replace(tensor=stored._replace(shape=shape), content=_decay_logs(header, named))
    elif name.endswith((".D", "mamba.norm.weight", "mixer.norm.weight")):
        yield named._replace(tensor=stored._replace(shape=(math.prod(stored.shape),)))
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        yield named._replace(tensor=stored._replace(shape=(math.prod(stored.shape[:-1]), 1, stored.shape[-1])))
    elif name.endswith("in_proj_ba.weight") and not _has(header, "ssm_in.weight"):
        yield from _steps_and_decays(header, named)
    else:
        yield named


def _decay_logs(header: GgufHeader, named: NamedTensor) -> bytes:
    decays = header.file.floats(named.tensor)
    if max(decays) >= 0 or not all(map(math.isfinite, decays)):
        raise CheckpointError(f"tensor {named.tensor.name} in {header.origin} must hold negative numbers")
    return struct.pack(f"<{len(decays)}f", *[math.log(-decay) for decay in decays])


def _steps_and_decays(header: GgufHeader, named: NamedTensor) -> Iterator[NamedTensor]:
    """Divide a projection to steps and decays.

    For each key head it has the rows of steps of its value heads, then those of their decays.
    """
    groups, stored, content = header.integer("{arch}.ssm.group_count"), named.tensor, header.file.content(named.tensor)
    if not groups or stored.shape[0] % (2 * groups):
        raise CheckpointError(
            f"tensor {stored.name} in {header.origin} has {stored.shape[0]} rows for {groups} key heads"
        )
    size = len(content) // (2 * groups)
    half = stored._replace(shape=(stored.shape[0] // 2, *stored.shape[1:]), start=0, end=size * groups)
    for first, part in enumerate(("in_proj_b", "in_proj_a")):
        rows = [content[at : at + size] for at in range(first * size, len(content), 2 * size)]
        yield NamedTensor(named.name.replace("in_proj_ba", part), half, content=b"".join(rows))


_family = partial(GgufFamily, has_states=True, convert=_converted)
# No dimensions are rotated, whatever number files state, but rows of queries and keys are reordered nevertheless.
_unrotated = partial(_family, may_turn_a_part=True, is_turned=True)
_lfm = partial(_family, layers=_LFM2_LAYERS, outer={"token_embd_norm": "model.norm"})
_qwen = partial(_family, layers=_QWEN_LAYERS, may_turn_a_part=True)
RECURRENT: dict[str, GgufFamily] = {
    "lfm2": _lfm("Lfm2ForCausalLM", _lfm2),
    "lfm2moe": _lfm("Lfm2MoeForCausalLM", _lfm2_moe),
    "qwen3next": _qwen("Qwen3NextForCausalLM", _qwen3_next),
    # A text's three rows of positions are equal, so sections have no effect.
    "qwen35": _qwen("Qwen3_5ForCausalLM", _qwen3_5, rope_keys=("dimension_sections",)),
    "qwen35moe": _qwen("Qwen3_5MoeForCausalLM", _qwen3_5_moe, rope_keys=("dimension_sections",)),
    "granitehybrid": _unrotated("GraniteMoeHybridForCausalLM", _granite_hybrid, _GRANITE_LAYERS),
    "falcon-h1": _family("FalconH1ForCausalLM", _falcon_h1, _FALCON_LAYERS),
    "kimi-linear": _family("KimiLinearForCausalLM", _kimi_linear, _KIMI_LAYERS, has_own_heads=True),
    "nemotron_h": _unrotated("NemotronHForCausalLM", _nemotron, _NEMOTRON_LAYERS),
    "nemotron_h_moe": _unrotated("NemotronHForCausalLM", _nemotron_moe, _NEMOTRON_LAYERS),
}

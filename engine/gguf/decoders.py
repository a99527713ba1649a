"""Families with grouped-query attention: how their config follows from a GGUF file's metadata.

Values that files do not contain are those that llama.cpp infers in its src/models.
"""

import struct
from collections.abc import Iterator
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import XIELU_PARTS
from pilotlight.engine.gguf.family import (
    LAYERS,
    SHARED_LAYERS,
    YARN_WEIGHT,
    GgufFamily,
    GgufHeader,
    NamedTensor,
    num_layers,
    routed_experts,
    rule_of_factors,
    yarn_weights,
)
from pilotlight.engine.gguf.kinds import KINDS

GEMMA_LAYERS = LAYERS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_MIXTRAL_LAYERS = LAYERS | {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3", "ffn_down_exps": "block_sparse_moe.experts.w2",
}  # fmt: skip
QWEN2_MOE_LAYERS = LAYERS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
GRANITE_MOE_LAYERS = LAYERS | {
    "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj", "ffn_down_exps": "block_sparse_moe.experts.down_proj",
}  # fmt: skip
_MINIMAX_LAYERS = _MIXTRAL_LAYERS | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_ERNIE_MOE_LAYERS = SHARED_LAYERS | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_DOTS_LAYERS = SHARED_LAYERS | {"exp_probs_b": "mlp.gate.e_score_correction_bias"}
_GLM_MOE_LAYERS = _DOTS_LAYERS | {"post_attention_norm": "post_attention_layernorm"}
_EXAONE_MOE_LAYERS = SHARED_LAYERS | {"exp_probs_b": "mlp.e_score_correction_bias"}
_TRINITY_LAYERS = SHARED_LAYERS | {
    "attn_gate": "self_attn.gate_proj", "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm", "ffn_gate_inp": "mlp.router.gate", "exp_probs_b": "mlp.expert_bias",
}  # fmt: skip
_HUNYUAN_MOE_LAYERS = LAYERS | {
    "ffn_gate_inp": "mlp.gate.wg", "ffn_gate_shexp": "mlp.shared_mlp.gate_proj", "ffn_up_shexp": "mlp.shared_mlp.up_proj",
    "ffn_down_shexp": "mlp.shared_mlp.down_proj",
}  # fmt: skip
_APERTUS_LAYERS = LAYERS | {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"}
_GRANITE_SWA_LAYERS = LAYERS | {"attn_sinks": "self_attn.sinks"}
_GRANITE_MOE_SWA_LAYERS = _GRANITE_SWA_LAYERS | {
    "ffn_gate_inp": "block_sparse_moe.router", "ffn_gate_up_exps": "block_sparse_moe.experts.gate_up_proj",
    "ffn_down_exps": "block_sparse_moe.experts.down_proj", "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}  # fmt: skip
_GEMMA4_LAYERS = GEMMA_LAYERS | {
    "layer_output_scale": "layer_scalar", "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm", "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale", "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_up_exps": "experts.gate_up_proj", "ffn_gate_exps": "experts.gate_proj", "ffn_up_exps": "experts.up_proj",
    "ffn_down_exps": "experts.down_proj",
}  # fmt: skip
_LAYER_INPUTS = "per_layer_token_embd"
_GPT_OSS_LAYERS = LAYERS | {
    "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks", "ffn_gate_inp": "mlp.router",
}  # fmt: skip
_MIMO_LAYERS = LAYERS | {
    "attn_sinks": "self_attn.attention_sink_bias", "exp_probs_b": "mlp.gate.e_score_correction_bias",
}  # fmt: skip
_LLAMA4_LAYERS = {key: name.replace("mlp.", "feed_forward.") for key, name in QWEN2_MOE_LAYERS.items()} | {
    "ffn_gate_inp": "feed_forward.router"
}
_GLM_LAYERS = LAYERS | {
    "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
_PHI_LAYERS = LAYERS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OLMO_LAYERS = LAYERS | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def dense(header: GgufHeader) -> dict[str, Any]:
    return {"intermediate_size": header.integer("{arch}.feed_forward_length")}


def _experts(header: GgufHeader) -> dict[str, Any]:
    """Return the config of families whose experts have no further keys.

    The weights of chosen experts are not normalised, as in llama.cpp.
    """
    count = header.integer("{arch}.expert_count")
    return {
        "intermediate_size": header.integer("{arch}.feed_forward_length"),
        "num_experts": count,
        "num_local_experts": count,  # Mixtral's key
        "num_experts_per_tok": header.integer("{arch}.expert_used_count"),
        "norm_topk_prob": False,
    }


def qwen2_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        **_experts(header),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": header.integer("{arch}.expert_shared_feed_forward_length"),
    }


_FULL, _SLIDING = "full_attention", "sliding_attention"
_PATTERN = "{arch}.attention.sliding_window_pattern"


def _layer_types(header: GgufHeader) -> list[str]:
    return [_SLIDING if has_window else _FULL for has_window in header.flags(_PATTERN)[: num_layers(header)]]


def _windows(header: GgufHeader) -> dict[str, Any]:
    """Return the config of a family in which some layers may have windows.

    They are the family's default layers, unless the file has a list.
    """
    window = header.integer("{arch}.attention.sliding_window", 0)
    listed = {"layer_types": _layer_types(header)} if window and _PATTERN in header else {}
    return {**dense(header), "sliding_window": window or None, **listed}


def _qwen3_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        "intermediate_size": header.integer(
            "{arch}.feed_forward_length", header.integer("{arch}.expert_feed_forward_length")
        ),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "num_experts": header.integer("{arch}.expert_count"),
        "num_experts_per_tok": header.integer("{arch}.expert_used_count"),
        "norm_topk_prob": True,  # as always in llama.cpp
    }


def gemma3(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Gemma 3, in which every sixth layer has full attention.

    The largest model (62 layers) scales scores by hidden size / heads, not by the head size. Files do not contain this; llama.cpp infers it as well.
    """
    heads, head_dim = header.integer("{arch}.attention.head_count"), header.integer("{arch}.attention.key_length")
    is_largest = header.integer("{arch}.block_count") == 62
    return {
        "intermediate_size": header.integer("{arch}.feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": header.integer("{arch}.embedding_length") // heads if is_largest else head_dim,
        "sliding_window": header.integer("{arch}.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": header.number("{arch}.rope.freq_base_swa", 10_000.0),
        "norm_offset_included": True,
    }


def _gemma2(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Gemma 2, in which every second layer has full attention.

    The largest model (46 layers) scales scores by hidden size / heads, not by the head size, as in llama.cpp.
    """
    heads, head_dim = header.integer("{arch}.attention.head_count"), header.integer("{arch}.attention.key_length")
    is_largest = header.integer("{arch}.block_count") == 46
    return {
        "intermediate_size": header.integer("{arch}.feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": header.integer("{arch}.embedding_length") // heads if is_largest else head_dim,
        "sliding_window": header.integer("{arch}.attention.sliding_window"),
        "attn_logit_softcapping": header.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": header.number("{arch}.final_logit_softcapping", 30.0),
        "norm_offset_included": True,
    }


def granite(header: GgufHeader) -> dict[str, Any]:
    return {
        **dense(header),
        "attention_multiplier": header.number("{arch}.attention.scale"),
        "embedding_multiplier": header.number("{arch}.embedding_scale"),
        "residual_multiplier": header.number("{arch}.residual_scale"),
        "logits_scaling": header.number("{arch}.logit_scale"),
    }


def _granite_moe(header: GgufHeader) -> dict[str, Any]:
    return {**_experts(header), **granite(header)}


def _all_experts(header: GgufHeader) -> dict[str, Any]:
    return {**_experts(header), "intermediate_size": header.integer("{arch}.expert_feed_forward_length")}


def _ernie_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        **dense(header),
        "moe_num_experts": header.integer("{arch}.expert_count"),
        "moe_k": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "moe_num_shared_experts": header.integer("{arch}.expert_shared_count", 0),
        "moe_layer_interval": header.integer("{arch}.interleave_moe_layer_step", 1),
        "moe_layer_start_index": header.integer("{arch}.leading_dense_block_count", 0),
    }


def _glm_moe(header: GgufHeader) -> dict[str, Any]:
    """Return the config of GLM-4.5, 4.6 and 4.7."""
    return routed_experts(header, renormalise=True)


def _dots1(header: GgufHeader) -> dict[str, Any]:
    return {**routed_experts(header, renormalise=False), "sliding_window": None}


def _exaone_moe(header: GgufHeader) -> dict[str, Any]:
    found = routed_experts(header, renormalise=False)
    named = {"num_experts": found["n_routed_experts"], "num_shared_experts": found["n_shared_experts"]}
    return {**found, **named, **_windows(header)}


def _trinity(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Arcee Trinity. Embeddings are always multiplied, as in llama.cpp."""
    found = routed_experts(header, renormalise=True)
    return {
        **_windows(header),
        "num_experts": found["n_routed_experts"],
        "num_experts_per_tok": found["num_experts_per_tok"],
        "moe_intermediate_size": found["moe_intermediate_size"],
        "num_shared_experts": found["n_shared_experts"],
        "num_dense_layers": found["first_k_dense_replace"],
        "route_scale": found["routed_scaling_factor"],
        "route_norm": found["norm_topk_prob"],
        "mup_enabled": True,
    }


def _hunyuan_moe(header: GgufHeader) -> dict[str, Any]:
    return {
        **dense(header),
        "num_experts": header.integer("{arch}.expert_count"),
        "moe_topk": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
    }


def _cohere(header: GgufHeader) -> dict[str, Any]:
    eps = header.number("{arch}.attention.layer_norm_epsilon")
    return {**_windows(header), "logit_scale": header.number("{arch}.logit_scale", 1.0), "layer_norm_eps": eps}


def _gemma(header: GgufHeader) -> dict[str, Any]:
    return {**dense(header), "norm_offset_included": True}


def _granite_swa(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Granite with windows; a file may have a list of the layers that rotate."""
    turns, theta = "{arch}.attention.rope_pattern", header.number("{arch}.rope.freq_base")
    listed = {"layer_rope_theta": [theta * turn for turn in header.flags(turns)]} if turns in header else {}
    return {**granite(header), **_windows(header), **listed}


def _granite_moe_swa(header: GgufHeader) -> dict[str, Any]:
    shared = header.integer("{arch}.expert_shared_feed_forward_length", 0)
    return {**_experts(header), **_granite_swa(header), "shared_intermediate_size": shared}


def _with_activation(header: GgufHeader, named: NamedTensor) -> Iterator[NamedTensor]:
    """Return a tensor of Apertus, and after a feed-forward's first one the parameters of its activation.

    Files have these in the metadata, as one number or one for each layer.
    """
    yield named
    before, found, _ = named.name.partition("mlp.up_proj.weight")
    if not found:
        return
    layer = int(before.split(".")[-2])
    for part, shape in XIELU_PARTS.items():
        numbers = header.numbers_per_layer(f"xielu.{part}", num_layers(header))
        stored = named.tensor._replace(kind=KINDS[0], shape=shape, start=0, end=4)
        yield NamedTensor(f"{before}mlp.act_fn.{part}", stored, content=struct.pack("<f", numbers[layer]))


def _phi3(header: GgufHeader) -> dict[str, Any]:
    return {**dense(header), "sliding_window": header.integer("{arch}.attention.sliding_window", 0) or None}


def _smollm3(header: GgufHeader) -> dict[str, Any]:
    return {**dense(header), "no_rope_layer_interval": 4}  # a constant of llama.cpp, which files do not contain


def _mistral3(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Mistral 3 and Ministral 3; in the latter queries grow with their position."""
    growth = header.number("{arch}.attention.temperature_scale", 0.0)
    rope = yarn_weights(header) | {"llama_4_scaling_beta": growth}
    return {**dense(header), "sliding_window": None, "rope_scaling": rope}


def _gpt_oss(header: GgufHeader) -> dict[str, Any]:
    """Return the config of gpt-oss.

    The limits of YaRN's blend are not rounded in the published models, though they are in llama.cpp.
    """
    return {**_windows(header), **_all_experts(header), "rope_scaling": {"truncate": False}}


def _llama4(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Llama 4.

    Chunks, the layers without rotation and the growth of queries are constants of llama.cpp, equal to the defaults of config.json. The model with
    128 experts does not normalise queries and keys.
    """
    if (window := header.integer("{arch}.attention.sliding_window", 8192)) != 8192:
        raise CheckpointError(f"{header.origin} has llama4.attention.sliding_window = {window}; supported is 8192")
    experts = _all_experts(header)
    return {
        **experts,
        "intermediate_size_mlp": header.integer("{arch}.feed_forward_length"),
        "interleave_moe_layer_step": header.integer("{arch}.interleave_moe_layer_step"),
        "use_qk_norm": experts["num_local_experts"] != 128,
    }


def _mimo2(header: GgufHeader) -> dict[str, Any]:
    """Return the config of MiMo-V2-Flash, whose files count the tokens before the query in a window."""
    types, key_dim = _layer_types(header), header.positive("{arch}.attention.key_length")
    kv_heads = header.per_layer("{arch}.attention.head_count_kv", len(types))
    return {
        **routed_experts(header, renormalise=True),
        "num_key_value_heads": min(kv_heads, default=0),
        "head_dim": key_dim,
        "v_head_dim": header.integer("{arch}.attention.value_length"),
        "partial_rotary_factor": header.integer("{arch}.rope.dimension_count") / key_dim,
        "swa_rope_theta": header.number("{arch}.rope.freq_base_swa"),
        "attention_value_scale": header.number("{arch}.attention.value_scale", 1.0),
        "sliding_window_size": header.integer("{arch}.attention.sliding_window"),
        "layer_types": types,
    }


def _gemma4(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Gemma 4.

    Layers with full attention have other heads, and may have no projection to values. The last layers may read the keys and values of earlier ones,
    and then have a feed-forward that is twice as wide.
    """
    types, theta = _layer_types(header), header.number("{arch}.rope.freq_base")
    kv_heads = dict(zip(types, header.per_layer("{arch}.attention.head_count_kv", len(types)), strict=True))
    wide, narrow = (header.integer("{arch}.attention.key_length" + suffix) for suffix in ("", "_swa"))
    for key in ("attention.value_length", "rope.dimension_count"):
        header.require_equal("{arch}." + key, wide)
        header.require_equal(f"{{arch}}.{key}_swa", narrow)
    shared, inner = header.integer("{arch}.attention.shared_kv_layers", 0), "{arch}.feed_forward_length"
    full = [i for i, kind in enumerate(types[: len(types) - shared]) if kind == _FULL]
    sizes = header.per_layer(inner, len(types))
    is_wide = sizes[-1] > sizes[0]
    if sizes != sizes[:1] * (len(types) - shared) + [sizes[0] * (1 + is_wide)] * shared:
        raise CheckpointError(
            f"{header.origin} has {header.architecture}.feed_forward_length = {sizes}; they must be equal, "
            f"or those of the last {shared} layers twice the others"
        )
    table = header.file.tensors.get(f"{_LAYER_INPUTS}.weight")
    cap = "{arch}.final_logit_softcapping"
    return {
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": is_wide,
        "num_kv_shared_layers": shared,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": header.integer("{arch}.embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        **_gemma4_experts(header),
        "head_dim": narrow,
        "global_head_dim": wide,
        "num_key_value_heads": kv_heads.get(_SLIDING),
        "num_global_key_value_heads": kv_heads.get(_FULL),
        "attention_k_eq_v": not all(header.has(f"blk.{i}.attn_v.weight") for i in full),
        "layer_types": types,
        "sliding_window": header.integer("{arch}.attention.sliding_window"),
        "rope_parameters": {
            _FULL: rule_of_factors(header, wide, theta) | {"rope_theta": theta},
            _SLIDING: {"rope_type": "default", "rope_theta": header.number("{arch}.rope.freq_base_swa")},
        },
        "final_logit_softcapping": header.number(cap) if cap in header else None,
    }


def _gemma4_experts(header: GgufHeader) -> dict[str, Any]:
    if not (count := header.integer("{arch}.expert_count", 0)):
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
    }


GROUPED = {
    "llama": GgufFamily("LlamaForCausalLM", dense, is_turned=True),
    "qwen2": GgufFamily("Qwen2ForCausalLM", dense),
    "qwen3": GgufFamily("Qwen3ForCausalLM", dense),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _gemma2, GEMMA_LAYERS),
    "granite": GgufFamily("GraniteForCausalLM", granite, is_turned=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM", dense, _OLMO_LAYERS),
    "phi3": GgufFamily("Phi3ForCausalLM", _phi3, _PHI_LAYERS),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", _smollm3, is_turned=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", gemma3, GEMMA_LAYERS, rope_keys=("freq_base_swa",)),
    "llama with experts": GgufFamily("MixtralForCausalLM", _experts, _MIXTRAL_LAYERS, is_turned=True),
    "olmo2 with windows": GgufFamily("Olmo3ForCausalLM", _windows, _OLMO_LAYERS),
    "olmoe": GgufFamily("OlmoeForCausalLM", _experts),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", qwen2_moe, QWEN2_MOE_LAYERS),
    "exaone4": GgufFamily("Exaone4ForCausalLM", _windows, _OLMO_LAYERS),
    "ernie4_5": GgufFamily("Ernie4_5ForCausalLM", dense),
    "seed_oss": GgufFamily("SeedOssForCausalLM", dense, _OLMO_LAYERS, may_have_biases=True),
    "command-r": GgufFamily("CohereForCausalLM", _cohere),
    "cohere2": GgufFamily("Cohere2ForCausalLM", _cohere),
    "arcee": GgufFamily("ArceeForCausalLM", dense, is_turned=True),
    "apertus": GgufFamily("ApertusForCausalLM", dense, _APERTUS_LAYERS, convert=_with_activation),
    "gemma": GgufFamily("GemmaForCausalLM", _gemma),
    "granite_swa": GgufFamily("GraniteSWAForCausalLM", _granite_swa, _GRANITE_SWA_LAYERS, is_turned=True),
    "granite_swa with experts": GgufFamily(
        "GraniteMoeSWAForCausalLM", _granite_moe_swa, _GRANITE_MOE_SWA_LAYERS, is_turned=True
    ),
    "hunyuan-dense": GgufFamily("HunYuanDenseV1ForCausalLM", dense),
    "hunyuan-moe": GgufFamily("HunYuanMoEV1ForCausalLM", _hunyuan_moe, _HUNYUAN_MOE_LAYERS),
    "dots1": GgufFamily("Dots1ForCausalLM", _dots1, _DOTS_LAYERS),
    "exaone-moe": GgufFamily("ExaoneMoeForCausalLM", _exaone_moe, _EXAONE_MOE_LAYERS),
    "afmoe": GgufFamily("AfmoeForCausalLM", _trinity, _TRINITY_LAYERS),
    "chatglm": GgufFamily("GlmForCausalLM", dense, _PHI_LAYERS, may_turn_a_part=True, may_have_biases=True),
    "glm4": GgufFamily("Glm4ForCausalLM", dense, _GLM_LAYERS, may_turn_a_part=True, may_have_biases=True),
    "granitemoe": GgufFamily("GraniteMoeForCausalLM", _granite_moe, GRANITE_MOE_LAYERS, is_turned=True),
    "minimax-m2": GgufFamily("MiniMaxM2ForCausalLM", _all_experts, _MINIMAX_LAYERS, may_turn_a_part=True),
    "glm4moe": GgufFamily("Glm4MoeForCausalLM", _glm_moe, _GLM_MOE_LAYERS, may_turn_a_part=True, may_have_biases=True),
    "ernie4_5-moe": GgufFamily("Ernie4_5_MoeForCausalLM", _ernie_moe, _ERNIE_MOE_LAYERS),
    "mistral3": GgufFamily("Ministral3ForCausalLM", _mistral3, is_turned=True, rope_keys=(YARN_WEIGHT,)),
    "gpt-oss": GgufFamily("GptOssForCausalLM", _gpt_oss, _GPT_OSS_LAYERS, may_have_biases=True),
    "llama4": GgufFamily("Llama4ForCausalLM", _llama4, _LLAMA4_LAYERS, may_have_biases=True),
    "mimo2": GgufFamily(
        "MiMoV2FlashForCausalLM", _mimo2, _MIMO_LAYERS, has_own_heads=True, rope_keys=("freq_base_swa",)
    ),
    "gemma4": GgufFamily(
        "Gemma4ForCausalLM",
        _gemma4,
        _GEMMA4_LAYERS,
        has_own_heads=True,
        rope_keys=("freq_base_swa", "dimension_count_swa"),
        outer={
            _LAYER_INPUTS: "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
    ),
    # The text parts of models whose vision tower is another file. With text alone, the sections of rotary positions are equal.
    "qwen2vl": GgufFamily("Qwen2_5_VLForConditionalGeneration", dense, rope_keys=("dimension_sections",)),
    "qwen3vl": GgufFamily("Qwen3VLForConditionalGeneration", dense, rope_keys=("dimension_sections",)),
    "qwen3vlmoe": GgufFamily("Qwen3VLMoeForConditionalGeneration", _qwen3_moe, rope_keys=("dimension_sections",)),
}

"""Families with latent attention in GGUF files.

llama.cpp computes such attention as if all heads shared one key and one value: `key_length` and `head_count_kv` describe those, and keys that end in
_mla the model's heads. Files written before April 2025 have no such keys, and `attn_kv_b` in one tensor.
"""

from typing import Any

from pilotlight.engine.gguf.family import (
    SHARED_LAYERS,
    YARN_WEIGHT,
    GgufFamily,
    GgufHeader,
    routed_experts,
    yarn_weights,
)

LATENT_LAYERS = SHARED_LAYERS | {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias", "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
}  # fmt: skip
# (groups, chosen groups) by number of experts, for files written before the converter stored them: DeepSeek-V2's and V3's.
_GROUPS = {160: (8, 3), 256: (8, 4)}
_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of the functions that score experts


def deepseek_variant(header: GgufHeader) -> str:
    """Return the name in LATENT of a file of the architecture deepseek2, which several families share."""
    is_biased = any(name.endswith(".exp_probs_b.bias") for name in header.file.tensors)
    scores = header.integer("{arch}.expert_gating_func", _SIGMOID if is_biased else _SOFTMAX)
    if scores != _SIGMOID:
        return (
            "mistral4" if header.number("{arch}.attention.temperature_scale", 0.0) else "deepseek2"
        )  # Mistral Large 3
    is_glm = "tokenizer.ggml.pre" in header and header.text("tokenizer.ggml.pre") == "glm4"
    return "deepseek2 of GLM" if is_glm else "deepseek2 with sigmoids"


def latent(header: GgufHeader) -> dict[str, Any]:
    rotated, query_rank = header.integer("{arch}.rope.dimension_count"), "{arch}.attention.q_lora_rank"
    key, value = (
        header.integer(f"{{arch}}.attention.{part}_length_mla", header.integer(f"{{arch}}.attention.{part}_length"))
        for part in ("key", "value")
    )
    found = routed_experts(header, renormalise=False)
    if "{arch}.expert_group_count" not in header:
        found["n_group"], found["topk_group"] = _GROUPS.get(found["n_routed_experts"], (1, 1))
    return {
        **found,
        "q_lora_rank": header.integer(query_rank) if query_rank in header else None,
        "kv_lora_rank": header.integer("{arch}.attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_scaling": yarn_weights(header, stored_share=0.1),
    }


def _deepseek2(header: GgufHeader) -> dict[str, Any]:
    found = latent(header)
    return {**found, "topk_method": "group_limited_greedy" if found["n_group"] > 1 else "greedy"}


def _mistral4(header: GgufHeader) -> dict[str, Any]:
    """Return the config of Mistral Small 4.

    Its files do not contain the growth of queries, nor does llama.cpp compute it; here it has its published weight.
    """
    found = latent(header)
    growth = header.number("{arch}.attention.temperature_scale", 0.1)
    return {**found, "rope_scaling": found["rope_scaling"] | {"llama_4_scaling_beta": growth}}


def _family(architecture: str, configure: Any) -> GgufFamily:
    return GgufFamily(architecture, configure, LATENT_LAYERS, has_own_heads=True, rope_keys=(YARN_WEIGHT,))


LATENT = {
    "deepseek2": _family("DeepseekV2ForCausalLM", _deepseek2),
    "deepseek2 with sigmoids": _family("DeepseekV3ForCausalLM", latent),
    "deepseek2 of GLM": _family("Glm4MoeLiteForCausalLM", latent),
    "mistral4": _family("Mistral4ForCausalLM", _mistral4),
}

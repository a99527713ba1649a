"""The metadata of GGUF files: sizes in llama.cpp's keys, from a checkpoint's config.json, as its converter writes them."""

import math
from typing import Any

import gguf

LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
OWN_HEADS = (*LATENT, "mimo_v2_flash", "gemma4_text")  # heads differ between layers or have several parts
WITH_NEXTN = (
    "glm4_moe",
    "glm4_moe_lite",
    "mimo_v2_flash",
)  # files have a layer that predicts further tokens, which is not used


def add_sizes(writer: gguf.GGUFWriter, described: dict[str, Any]) -> None:
    writer.add_context_length(described["max_position_embeddings"])
    writer.add_embedding_length(described["hidden_size"])
    kind = described["model_type"]
    writer.add_block_count(described["num_hidden_layers"] + (kind in WITH_NEXTN))
    if kind in WITH_NEXTN:
        writer.add_nextn_predict_layers(1)
    inner = described.get("intermediate_size_mlp", described["intermediate_size"])
    shared = described.get("num_kv_shared_layers", 0)
    is_double = described.get("use_double_wide_mlp", False)
    writer.add_feed_forward_length(
        [inner] * (described["num_hidden_layers"] - shared) + [2 * inner] * shared if is_double else inner
    )
    writer.add_head_count(described["num_attention_heads"])
    if kind not in OWN_HEADS:
        writer.add_head_count_kv(described["num_key_value_heads"])
    if "logit_scale" in described:
        writer.add_logit_scale(described["logit_scale"])
        writer.add_layer_norm_eps(described["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(described["rms_norm_eps"])
    if "head_dim" in described and kind not in OWN_HEADS:
        writer.add_key_length(described["head_dim"])
        writer.add_value_length(described["head_dim"])
    rope = described["rope_parameters"]
    if kind in ("olmo3", *OWN_HEADS[-2:]) or rope.get("sliding_attention", {}).get("rope_theta", 10_000.0) != 10_000.0:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])  # newer files
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            for key in {"beta_fast", "beta_slow"} & rope.keys():
                writer.add_float32(f"{writer.arch}.rope.scaling.yarn_{key}", rope[key])
    if described.get("sliding_window") and kind != "mimo_v2_flash":
        writer.add_sliding_window(described["sliding_window"])
    if kind in ("granite", "granitemoe"):
        writer.add_attention_scale(described["attention_multiplier"])
        writer.add_embedding_scale(described["embedding_multiplier"])
        writer.add_residual_scale(described["residual_multiplier"])
        writer.add_logit_scale(described["logits_scaling"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(described["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(described["final_logit_softcapping"])
    if kind in ("olmo3", "exaone4", "exaone_moe") and described.get("sliding_window"):
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in described["layer_types"]])
    if rope.get("partial_rotary_factor", 1.0) < 1.0 and kind not in OWN_HEADS:
        writer.add_rope_dimension_count(int(described["head_dim"] * rope["partial_rotary_factor"]))
    if "num_experts_per_tok" in described:
        count = next(key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in described)
        writer.add_expert_count(described[count])
        writer.add_expert_used_count(described["num_experts_per_tok"])
    if described.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(described["moe_intermediate_size"])
    if kind == "hunyuan_v1_moe":
        writer.add_expert_count(described["num_experts"])
        writer.add_expert_used_count(described["moe_topk"][0])
        writer.add_expert_feed_forward_length(described["intermediate_size"])
    if kind == "afmoe":
        writer.add_expert_shared_count(described["num_shared_experts"])
        writer.add_leading_dense_block_count(described["num_dense_layers"])
        writer.add_expert_weights_scale(described["route_scale"])
    if kind in (*LATENT, "glm4_moe", "dots1", "exaone_moe"):
        writer.add_expert_shared_count(described.get("n_shared_experts", described.get("num_shared_experts")))
        writer.add_leading_dense_block_count(described.get("first_k_dense_replace", 1))
        writer.add_expert_weights_scale(described["routed_scaling_factor"])
    if kind in ("glm4_moe", "dots1", "exaone_moe") or (kind in LATENT and described["norm_topk_prob"]):
        writer.add_expert_weights_norm(described["norm_topk_prob"])
    if kind in ("minimax_m2", "gpt_oss", "llama4_text"):
        writer.add_expert_feed_forward_length(described["intermediate_size"])
    if kind == "ernie4_5_moe":
        writer.add_expert_count(described["moe_num_experts"])
        writer.add_expert_used_count(described["moe_k"])
        writer.add_expert_shared_count(described["moe_num_shared_experts"])
        writer.add_interleave_moe_layer_step(described["moe_layer_interval"])
        writer.add_leading_dense_block_count(described["moe_layer_start_index"])
    if "shared_expert_intermediate_size" in described:
        writer.add_expert_shared_feed_forward_length(described["shared_expert_intermediate_size"])
    if kind in LATENT:
        _add_latent(writer, described)
    if kind == "ministral3":
        writer.add_rope_dimension_count(described["head_dim"])
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if kind == "llama4_text":
        writer.add_interleave_moe_layer_step(described["interleave_moe_layer_step"])
        writer.add_rope_dimension_count(described["head_dim"])
    if kind in ("mimo_v2_flash", "gemma4_text"):
        _add_kinds_of_layers(writer, described)


def _add_latent(writer: gguf.GGUFWriter, described: dict[str, Any]) -> None:
    latent, rotated = described["kv_lora_rank"], described["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    if described.get("q_lora_rank"):
        writer.add_q_lora_rank(described["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(described["qk_nope_head_dim"] + rotated)
    writer.add_value_length_mla(described["v_head_dim"])
    writer.add_rope_dimension_count(rotated)
    writer.add_expert_group_count(described.get("n_group") or 1)
    writer.add_expert_group_used_count(described.get("topk_group") or 1)
    if weight := described["rope_parameters"].get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


def _add_kinds_of_layers(writer: gguf.GGUFWriter, described: dict[str, Any]) -> None:
    """Add the sizes of heads that differ between layers with a window and others."""
    windows, rope = [kind == "sliding_attention" for kind in described["layer_types"]], described["rope_parameters"]
    kv_heads, head_dim = described["num_key_value_heads"], described["head_dim"]
    if described["model_type"] == "mimo_v2_flash":
        windows.append(True)  # of the layer that predicts a further token
        writer.add_sliding_window_pattern(list(map(int, windows)))
        writer.add_sliding_window(described["sliding_window"] - 1)
        writer.add_head_count_kv([2 * kv_heads if has_window else kv_heads for has_window in windows])
        writer.add_key_length(head_dim)
        writer.add_value_length(described["v_head_dim"])
        writer.add_rope_dimension_count(int(head_dim * rope["full_attention"]["partial_rotary_factor"]))
        writer.add_float32(f"{writer.arch}.attention.value_scale", described["attention_value_scale"])
        return
    wide = next(iter(described["per_layer_config"].values()))
    writer.add_sliding_window_pattern(windows)
    writer.add_head_count_kv(
        [kv_heads if has_window else wide.get("num_key_value_heads", kv_heads) for has_window in windows]
    )
    for size, suffix in ((wide["head_dim"], ""), (head_dim, "_swa")):
        for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
            writer.add_uint32(f"{writer.arch}.{key}{suffix}", size)
    writer.add_shared_kv_layers(described["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(described["hidden_size_per_layer_input"])
    if described["enable_moe_block"]:
        writer.add_expert_count(described["num_experts"])
        writer.add_expert_used_count(described["top_k_experts"])
    if described["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(described["final_logit_softcapping"])


def rope_factors(described: dict[str, Any]) -> list[float]:
    """Return the divisors of rotary frequencies; none if a file has no tensor of them."""
    rope = described["rope_parameters"]
    if described["model_type"] == "gemma4_text":
        pairs = next(iter(described["per_layer_config"].values()))["head_dim"] // 2
        turning = int(pairs * rope["full_attention"]["partial_rotary_factor"])
        return [1.0] * turning + [1e30] * (pairs - turning)
    if rope.get("rope_type") != "llama3":
        return []
    dim, low, high = described["head_dim"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    found = []
    for i in range(0, dim, 2):
        turns = length * rope["rope_theta"] ** (-i / dim) / (2 * math.pi)
        blend = (turns - low) / (high - low) if high > low else 0.0
        found.append(
            1.0 if turns > high else rope["factor"] if turns < low else 1 / ((1 - blend) / rope["factor"] + blend)
        )
    return found

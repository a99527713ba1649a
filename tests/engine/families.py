"""A tiny checkpoint or more of every model family.

Sizes are awkward on purpose; windows are shorter than the tests' prompts, so that every path crosses them. A new family
adds its row here, and every test of paths runs over it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.checkpoints import AWKWARD, LLAMA3_SCALING, pack_experts, write_checkpoint

UNSET = (
    "bos_token_id",
    "sliding_window",
    "q_lora_rank",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)  # None is a valid value of these
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 6, "head_dim": None, "q_lora_rank": 26, "kv_lora_rank": 20, "qk_nope_head_dim": 9, "qk_rope_head_dim": 6,
    "v_head_dim": 11, "moe_intermediate_size": 27,
}  # fmt: skip

# With weights twice as large transformers' own fp32 is off its fp64 by 4e-4: short keys are normalised, and a state carries what that amplifies.
DELTA: dict[str, Any] = {
    "initializer_range": 0.1,
    "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 6, "linear_value_head_dim": 5, "linear_conv_kernel_dim": 4,
    "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip

_MAMBA: dict[str, Any] = {
    "num_attention_heads": 7, "num_key_value_heads": 1, "mamba_n_heads": 3, "mamba_d_state": 5, "mamba_chunk_size": 16,
}  # fmt: skip


def config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """Return a configuration; None leaves a setting to the family's own default."""
    return kind(**{key: value for key, value in (AWKWARD | changes).items() if value is not None or key in UNSET})


MODELS: dict[str, PreTrainedConfig] = {
    "llama, six heads over two": config(LlamaConfig),
    "llama, three heads over one, tied": config(
        LlamaConfig, num_attention_heads=3, num_key_value_heads=1, head_dim=14, tie_word_embeddings=True
    ),
    "llama, biased": config(LlamaConfig, attention_bias=True, mlp_bias=True, num_key_value_heads=6),
    "llama, llama3 scaling": config(LlamaConfig, rope_parameters=LLAMA3_SCALING),
    "llama, linear scaling": config(
        LlamaConfig, rope_parameters={"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
    ),
    "qwen3, yarn, tied": config(Qwen3Config, rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3, biased, windows from layer 1": config(
        Qwen3Config, attention_bias=True, use_sliding_window=True, sliding_window=13, max_window_layers=1
    ),
    "qwen2, five heads": config(
        Qwen2Config, hidden_size=60, num_attention_heads=5, num_key_value_heads=5, head_dim=None
    ),
    "mistral, window": config(MistralConfig, sliding_window=7, num_attention_heads=9, num_key_value_heads=3),
    "mistral, no window": config(MistralConfig, sliding_window=None),
    "qwen3-moe, three of five experts, renormalised": config(
        Qwen3MoeConfig, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=27, norm_topk_prob=True
    ),
    "qwen3-moe, one dense layer, biased, window": config(
        Qwen3MoeConfig,
        num_experts=7,
        num_experts_per_tok=2,
        moe_intermediate_size=30,
        mlp_only_layers=[1],
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=20,
    ),
    "qwen3-moe, every second layer, tied": config(
        Qwen3MoeConfig,
        num_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=9,
        decoder_sparse_step=2,
        tie_word_embeddings=True,
    ),
    "mixtral, two of five experts": config(MixtralConfig, num_local_experts=5, num_experts_per_tok=2),
    "mixtral, one of three experts, window": config(
        MixtralConfig, num_local_experts=3, num_experts_per_tok=1, sliding_window=18
    ),
    "gemma3, windows but in layer 2, tied": config(
        Gemma3TextConfig,
        hidden_activation="gelu_pytorch_tanh",
        layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        num_hidden_layers=4,
        sliding_window=11,
        query_pre_attn_scalar=6,
        tie_word_embeddings=True,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
        },
    ),
    "gemma3, one kv head, untied": config(
        Gemma3TextConfig,
        hidden_activation="gelu_pytorch_tanh",
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=33,
        query_pre_attn_scalar=10,
        rope_parameters=None,
    ),
    "gpt-oss, three of five experts": config(
        GptOssConfig,
        num_attention_heads=9,
        num_key_value_heads=3,
        num_local_experts=5,
        num_experts_per_tok=3,
        sliding_window=15,
        swiglu_limit=0.5,  # low enough to be reached
        rope_parameters=YARN | {"truncate": False, "beta_fast": 8.0},
    ),
    "gpt-oss, no biases, window in layer 2, tied": config(
        GptOssConfig,
        num_local_experts=4,
        num_experts_per_tok=1,
        sliding_window=8,
        attention_bias=False,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "gpt-oss, experts in mxfp4": config(
        GptOssConfig,
        hidden_size=64,
        intermediate_size=96,
        num_local_experts=3,
        num_experts_per_tok=2,
        sliding_window=40,
        swiglu_alpha=1.5,
    ),
    "deepseek-v3, three experts in two of four groups, yarn": config(
        DeepseekV3Config,
        **LATENT,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3, queries at once, no groups, tied": config(
        DeepseekV3Config,
        **LATENT
        | {
            "q_lora_rank": None,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "v_head_dim": 16,
            "kv_lora_rank": 33,
        },
        n_routed_experts=7,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=0,
        norm_topk_prob=False,
        routed_scaling_factor=1.3,
        tie_word_embeddings=True,
    ),
    "glm-4.5, half of each head turns, normed and biased": config(
        Glm4MoeConfig,
        head_dim=12,
        attention_bias=True,
        use_qk_norm=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        moe_intermediate_size=27,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
    ),
    "scout, chunks of 16, one of five experts": config(
        Llama4TextConfig,
        intermediate_size=30,
        intermediate_size_mlp=57,
        num_local_experts=5,
        num_hidden_layers=4,
        no_rope_layers=[1, 0, 1, 1],
        moe_layers=[0, 1, 3],
        attention_chunk_size=16,
        floor_scale=9,
        attn_scale=0.3,
        rope_parameters=LLAMA3_SCALING,
    ),
    "scout, chunks of 23, two experts, biased, no norm": config(
        Llama4TextConfig,
        intermediate_size=27,
        intermediate_size_mlp=41,
        num_local_experts=4,
        num_experts_per_tok=2,
        interleave_moe_layer_step=2,
        no_rope_layer_interval=3,
        attention_chunk_size=23,
        attention_bias=True,
        use_qk_norm=False,
        attn_temperature_tuning=False,
    ),
}
# Each further family in two shapes, with its differences from those above. The quick tests take them along one path, the sweeps along every one.
_LITE = LATENT | {"num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 16, "q_lora_rank": None}
FURTHER: dict[str, PreTrainedConfig] = {
    "phi3, fused, six heads over two": config(Phi3Config, hidden_size=60, head_dim=None, sliding_window=None),
    "phi3, one kv head, window, tied, half of each head turns by short factors": config(
        Phi3Config,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        sliding_window=19,
        tie_word_embeddings=True,
        original_max_position_embeddings=256,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0, 1.1, 1.4],
            "long_factor": [1.0, 2.0, 3.0],
        },
    ),
    "ministral3, queries grow every 9 tokens": config(
        Ministral3Config,
        sliding_window=None,
        rope_parameters=YARN
        | {"original_max_position_embeddings": 9, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "ministral3, one kv head, window, tied": config(
        Ministral3Config,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=14,
        tie_word_embeddings=True,
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.1},
    ),
    "granite, scaled at each seam": config(
        GraniteConfig,
        hidden_size=60,
        head_dim=None,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "granite, biased, one kv head, tied": config(
        GraniteConfig,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        residual_multiplier=1.3,
    ),
    "gemma2, capped, tied": config(
        Gemma2Config,
        hidden_activation="gelu_pytorch_tanh",
        sliding_window=12,
        query_pre_attn_scalar=7,
        attn_logit_softcapping=2.0,  # low enough to be reached
        final_logit_softcapping=3.0,
        tie_word_embeddings=True,
    ),
    "gemma2, one kv head, untied, no caps": config(
        Gemma2Config,
        hidden_activation="gelu_pytorch_tanh",
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=25,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    ),
    "olmo2, normed behind": config(Olmo2Config, hidden_size=60, head_dim=None),
    "olmo2, one kv head, biased, tied": config(
        Olmo2Config,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        attention_bias=True,
        tie_word_embeddings=True,
    ),
    "olmo3, windows but in layer 3": config(
        Olmo3Config,
        hidden_size=60,
        head_dim=None,
        num_hidden_layers=4,
        sliding_window=11,
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "olmo3, one kv head, tied": config(
        Olmo3Config,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        sliding_window=23,
        tie_word_embeddings=True,
        rope_parameters=None,
    ),
    "exaone4, windows but in layer 1, which does not turn": config(
        Exaone4Config, sliding_window=13, sliding_window_pattern=2
    ),
    "exaone4, one kv head, no windows, tied": config(
        Exaone4Config,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=None,
        layer_types=["full_attention"] * 3,
        tie_word_embeddings=True,
    ),
    "smollm3, layer 1 does not turn": config(SmolLM3Config, hidden_size=60, head_dim=None, no_rope_layers=[1, 0, 1]),
    "smollm3, one kv head, window where nothing turns, tied": config(
        SmolLM3Config,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        no_rope_layer_interval=2,
        use_sliding_window=True,
        sliding_window=15,
        tie_word_embeddings=True,
    ),
    "glm4, fused, half of each head turns in neighbours": config(
        Glm4Config,
        head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "glm4, one kv head, unbiased, tied": config(
        Glm4Config,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=False,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.4},
    ),
    "seed-oss, biased before attention": config(SeedOssConfig, attention_dropout=0.0, residual_dropout=0.0),
    "seed-oss, one kv head, biased behind attention, tied": config(
        SeedOssConfig,
        num_attention_heads=3,
        num_key_value_heads=1,
        attention_bias=False,
        attention_out_bias=True,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        residual_dropout=0.0,
    ),
    "ernie, neighbours turn": config(Ernie4_5Config),
    "ernie, one kv head, biased, tied": config(
        Ernie4_5Config, num_attention_heads=3, num_key_value_heads=1, use_bias=True, tie_word_embeddings=True
    ),
    "qwen2-moe, a shared expert that is weighed": config(
        Qwen2MoeConfig,
        hidden_size=60,
        head_dim=None,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=27,
        shared_expert_intermediate_size=33,
        norm_topk_prob=True,
    ),
    "qwen2-moe, one kv head, a dense layer, tied": config(
        Qwen2MoeConfig,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=9,
        mlp_only_layers=[0],
        tie_word_embeddings=True,
    ),
    "olmoe, three of five experts": config(
        OlmoeConfig, hidden_size=60, head_dim=None, num_experts=5, num_experts_per_tok=3, norm_topk_prob=True
    ),
    "olmoe, one kv head, tied": config(
        OlmoeConfig,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
    "granite-moe, stacks of five experts": config(
        GraniteMoeConfig,
        hidden_size=60,
        head_dim=None,
        intermediate_size=31,
        num_local_experts=5,
        num_experts_per_tok=3,
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.5,
    ),
    "granite-moe, one kv head, tied": config(
        GraniteMoeConfig,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=None,
        intermediate_size=27,
        num_local_experts=3,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
    ),
    "minimax-m2, half of each head turns": config(
        MiniMaxM2Config,
        head_dim=12,
        intermediate_size=27,
        num_local_experts=6,
        num_experts_per_tok=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
    ),
    "minimax-m2, one kv head, tied": config(
        MiniMaxM2Config,
        num_attention_heads=3,
        num_key_value_heads=1,
        intermediate_size=21,
        num_local_experts=4,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
    ),
    "ernie-moe, two of six experts, a shared one": config(
        Ernie4_5_MoeConfig,
        head_dim=None,
        hidden_size=60,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=27,
        moe_num_shared_experts=2,
    ),
    "ernie-moe, one kv head, two dense layers, tied": config(
        Ernie4_5_MoeConfig,
        head_dim=None,
        hidden_size=60,
        num_attention_heads=5,
        num_key_value_heads=1,
        moe_num_experts=4,
        moe_k=3,
        moe_intermediate_size=21,
        moe_num_shared_experts=0,
        moe_layer_start_index=1,
        moe_layer_interval=2,
        tie_word_embeddings=True,
    ),
    "deepseek-v2, best of two of four groups, yarn": config(
        DeepseekV2Config,
        **LATENT
        | {"qk_nope_head_dim": 10},  # transformers' rotation needs an even number of dimensions before the rotated ones
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=1.7,
        first_k_dense_replace=1,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v2, queries at once, no groups, tied": config(
        DeepseekV2Config,
        **_LITE | {"qk_nope_head_dim": 8},
        hidden_size=60,
        n_routed_experts=5,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        tie_word_embeddings=True,
    ),
    "mimo-v2, windows but in layers 0 and 3, narrow values": config(
        MiMoV2FlashConfig,
        head_dim=12,
        v_head_dim=8,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=8,
        num_key_value_heads=2,
        moe_intermediate_size=27,
        n_routed_experts=6,
        num_experts_per_tok=3,
        sliding_window=13,
        norm_topk_prob=True,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 9_000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        },
    ),
    "mimo-v2, one kv head, values as they are, tied": config(
        MiMoV2FlashConfig,
        head_dim=18,
        v_head_dim=7,
        num_attention_heads=6,
        num_key_value_heads=1,
        attention_value_scale=None,
        moe_intermediate_size=21,
        n_routed_experts=4,
        num_experts_per_tok=1,
        sliding_window=21,
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
    "gemma4, wider heads where nothing is hidden, keys are values, capped": config(
        Gemma4TextConfig,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=0,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        sliding_window=11,
        global_head_dim=16,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
        rope_parameters={
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 9_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    ),
    "gemma4, one kv head, tied": config(
        Gemma4TextConfig,
        hidden_activation="gelu_pytorch_tanh",
        hidden_size_per_layer_input=0,
        num_attention_heads=3,
        num_key_value_heads=1,
        sliding_window=23,
        global_head_dim=14,
        rope_parameters=None,
        tie_word_embeddings=True,
    ),
    "lfm2, attention in layer 1": config(
        Lfm2Config,
        layer_types=["conv", "full_attention", "conv"],
        head_dim=None,
        num_attention_heads=7,
        num_key_value_heads=1,
    ),
    "lfm2, biased, a wide convolution, untied": config(
        Lfm2Config,
        layer_types=["full_attention", "conv", "conv", "full_attention"],
        num_hidden_layers=4,
        head_dim=None,
        hidden_size=48,
        conv_bias=True,
        conv_L_cache=5,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
    ),
    "qwen3-next, attention in layer 1, three of five experts": config(
        Qwen3NextConfig,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **DELTA,
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=27,
        shared_expert_intermediate_size=19,
    ),
    "qwen3-next, one kv head, biased, a dense layer, tied": config(
        Qwen3NextConfig,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        **DELTA | {"linear_num_key_heads": 3},
        num_key_value_heads=1,
        num_attention_heads=3,
        attention_bias=True,
        num_experts=4,
        num_experts_per_tok=1,
        moe_intermediate_size=9,
        shared_expert_intermediate_size=8,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        tie_word_embeddings=True,
    ),
    "qwen3.5, attention in layer 2": config(
        Qwen3_5TextConfig, layer_types=["linear_attention", "linear_attention", "full_attention"], **DELTA
    ),
    "qwen3.5-moe, two of four experts": config(
        Qwen3_5MoeTextConfig,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **DELTA,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=21,
        shared_expert_intermediate_size=11,
    ),
    "granite-4, attention in layer 1": config(
        GraniteMoeHybridConfig,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=None,
        **_MAMBA | {"num_key_value_heads": 7},
        num_local_experts=0,
        shared_intermediate_size=29,
        residual_multiplier=0.6,
        attention_multiplier=0.4,
        embedding_multiplier=1.5,
        logits_scaling=1.2,
    ),
    "granite-4, two groups, biased, turning, two of five experts, tied": config(
        GraniteMoeHybridConfig,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        **_MAMBA | {"mamba_n_groups": 2, "mamba_n_heads": 4, "num_attention_heads": 2},
        hidden_size=44,
        head_dim=None,
        attention_bias=True,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        position_embedding_type="rope",
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=13,
        tie_word_embeddings=True,
    ),
    "lfm2-moe, two of five experts": config(
        Lfm2MoeConfig,
        layer_types=["conv", "full_attention", "conv"],
        head_dim=None,
        num_attention_heads=7,
        num_key_value_heads=1,
        num_dense_layers=1,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=27,
    ),
    "glm-4.7-flash, three of eight experts": config(
        Glm4MoeLiteConfig, **LATENT, n_routed_experts=8, num_experts_per_tok=3, routed_scaling_factor=1.4
    ),
    "glm-4.7-flash, queries at once, all layers of experts, tied": config(
        Glm4MoeLiteConfig,
        **_LITE,
        n_routed_experts=5,
        num_experts_per_tok=2,
        mlp_layer_types=["sparse"] * 3,
        norm_topk_prob=False,
        tie_word_embeddings=True,
    ),
}
SWEPT = [pytest.param(name, marks=pytest.mark.slow) for name in FURTHER]
# Further families whose every part the C library computes.
FURTHER_RECORDED = (
    "phi3, fused, six heads over two",
    "seed-oss, biased before attention",
    "gemma2, one kv head, untied, no caps",
)
SEVERAL_TABLES = (
    "qwen3, biased, windows from layer 1",
    "gemma3, windows but in layer 2, tied",
)  # of those that are dense
PACKED = "gpt-oss, experts in mxfp4"


def write_family(directory: Path, name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    model = write_checkpoint(directory, MODELS[name] if name in MODELS else FURTHER[name], dtype=dtype)
    if name == PACKED:
        pack_experts(directory, model)
    return model

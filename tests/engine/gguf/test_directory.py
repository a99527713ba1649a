"""A GGUF file gives the same answers as a checkpoint with the same values, for every family and type of codes."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    ExaoneMoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral4Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.gguf.file import GgufFile
from pilotlight.engine.planning.model_plan import planned_weights_bytes, read_model
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.engine.weights.config import eos_token_ids, read_config
from tests.checkpoints import CHAT_TEMPLATE
from tests.engine.agreement import full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import YARN
from tests.engine.gguf.files import ARCHITECTURES, Kind, write_both

GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "sliding_window": 11, "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 0, "num_hidden_layers": 4, "sliding_window": 11,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"], "global_head_dim": 32,
    "num_global_key_value_heads": 1, "final_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 9_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}  # fmt: skip
LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 4, "num_hidden_layers": 3, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8, "v_head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
LITE = LATENT | {"q_lora_rank": None, "v_head_dim": 24, "n_group": 1, "topk_group": 1}
SHARPENED = YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}
GROWING = YARN | {
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama, tied, linear": (
        LlamaConfig, {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
    ),
    "qwen2": (Qwen2Config, {"head_dim": None}),
    "qwen3, yarn": (Qwen3Config, {"rope_parameters": YARN}),
    "qwen3moe": (Qwen3MoeConfig, {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "gemma3": (Gemma3TextConfig, GEMMA),
    "gemma3, another local base": (
        Gemma3TextConfig,
        GEMMA | {"rope_parameters": GEMMA["rope_parameters"] | {"sliding_attention": {"rope_type": "default", "rope_theta": 900.0}}},
    ),
    "gemma2": (
        Gemma2Config,
        {
            "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 11, "query_pre_attn_scalar": 16, "tie_word_embeddings": True,
            "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        GraniteConfig,
        {
            "head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
        },
    ),
    "olmo2": (Olmo2Config, {"head_dim": None}),
    "phi3": (Phi3Config, {"head_dim": None, "sliding_window": 19}),
    "smollm3": (SmolLM3Config, {"head_dim": None, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo3": (
        Olmo3Config,
        {
            "head_dim": None, "num_hidden_layers": 4, "sliding_window": 11,
            "rope_parameters": {
                "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "olmoe": (OlmoeConfig, {"head_dim": None, "num_experts": 4, "num_experts_per_tok": 2}),
    "qwen2moe": (
        Qwen2MoeConfig,
        {
            "head_dim": None, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64, "norm_topk_prob": False,
        },
    ),
    "exaone4": (Exaone4Config, {"num_hidden_layers": 4, "sliding_window": 13, "sliding_window_pattern": 3}),
    "exaone4, no windows": (Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True}),
    "ernie": (Ernie4_5Config, {}),
    "seed-oss": (SeedOssConfig, {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    "glm4": (Glm4Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}),
    "granite-moe": (
        GraniteMoeConfig,
        {
            "head_dim": None, "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.5,
            "num_local_experts": 4, "num_experts_per_tok": 2,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        {
            "num_local_experts": 4, "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "ernie-moe": (
        Ernie4_5_MoeConfig,
        {
            "head_dim": None, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32,
            "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        },
    ),
    "glm-4.5": (
        Glm4MoeConfig,
        {
            "num_hidden_layers": 3, "use_qk_norm": True, "attention_bias": True, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm-4.5, no norms, unbiased": (
        Glm4MoeConfig,
        {
            "use_qk_norm": False, "attention_bias": False, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 1,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "llama, llama3": (
        LlamaConfig,
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "deepseek-v2, groups, yarn": (
        DeepseekV2Config,
        LATENT | {
            "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7,
            "rope_parameters": SHARPENED,
        },
    ),
    "deepseek-v2, queries at once, tied": (
        DeepseekV2Config, LITE | {"topk_method": "greedy", "n_shared_experts": 1, "tie_word_embeddings": True},
    ),
    "deepseek-v3, groups, yarn": (
        DeepseekV3Config, LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3, queries at once, not renormalised": (
        DeepseekV3Config, LITE | {"n_shared_experts": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.3},
    ),
    "glm-4.7-flash": (Glm4MoeLiteConfig, LATENT | {"first_k_dense_replace": None, "routed_scaling_factor": 1.4}),
    "mistral4": (
        Mistral4Config,
        LATENT | {"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.3, "rope_parameters": GROWING},
    ),
    "ministral3": (Ministral3Config, {"sliding_window": None, "rope_parameters": GROWING | {"llama_4_scaling_beta": 0.3}}),
    "gpt-oss": (
        GptOssConfig,
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 15,
            "rope_parameters": YARN | {"truncate": False, "beta_fast": 8.0, "beta_slow": 1.0},
        },
    ),
    "llama4, every layer with experts": (
        Llama4TextConfig,
        {"num_hidden_layers": 5, "intermediate_size": 32, "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1},
    ),
    "llama4, llama3 without a blend, every second layer with experts": (
        Llama4TextConfig,
        {
            "num_hidden_layers": 4, "intermediate_size": 32, "intermediate_size_mlp": 64, "num_local_experts": 3, "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2, "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mimo-v2": (
        MiMoV2FlashConfig,
        {
            "num_hidden_layers": 4, "v_head_dim": 8, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 13, "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 9_000.0, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "gemma4, keys are values, capped": (Gemma4TextConfig, GEMMA4 | {"attention_k_eq_v": True, "final_logit_softcapping": 3.0}),
    "gemma4, values in every layer, tied": (Gemma4TextConfig, GEMMA4 | {"num_global_key_value_heads": None, "tie_word_embeddings": True}),
    "gemma4, inputs of layers, shared keys, twice as wide": (Gemma4TextConfig, GEMMA4 | {
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 440, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
    }),
    "gemma4, experts beside a dense part": (Gemma4TextConfig, GEMMA4 | {
        "attention_k_eq_v": True, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
    }),
    "glm4, biased": (Glm4Config, {
        "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }),
    "cohere": (CohereConfig, {"logit_scale": 0.3, "layer_norm_eps": 1e-4, "tie_word_embeddings": True}),
    "cohere, normed heads": (CohereConfig, {"logit_scale": 0.3, "use_qk_norm": True, "tie_word_embeddings": True}),
    "cohere2": (
        Cohere2Config,
        {"head_dim": None, "num_hidden_layers": 4, "sliding_window": 11, "logit_scale": 0.3, "rotary_pct": 1.0, "tie_word_embeddings": True},
    ),
    "arcee": (ArceeConfig, {}),
    "apertus": (ApertusConfig, {}),
    "gemma 1": (GemmaConfig, {"tie_word_embeddings": True}),
    "glm": (GlmConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}}),
    "hunyuan": (HunYuanDenseV1Config, {}),
    "hunyuan-moe": (HunYuanMoEV1Config, {"intermediate_size": 32, "num_experts": 4, "moe_topk": [2, 2]}),
    "dots1": (
        Dots1Config,
        {
            "num_hidden_layers": 3, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 2,
            "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "norm_topk_prob": True, "sliding_window": None,
        },
    ),
    "k-exaone": (
        ExaoneMoeConfig,
        {"num_hidden_layers": 4, "sliding_window": 13, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "trinity": (
        AfmoeConfig,
        {
            "num_hidden_layers": 4, "sliding_window": 13, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "num_shared_experts": 1, "route_scale": 1.7, "mup_enabled": True,
        },
    ),
}  # fmt: skip
REQUEST = full("a", random_prompt(40, seed=8), max_tokens=6)


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_numbers_give_the_same_tokens_and_logprobs(name: str, tmp_path: Path) -> None:
    family, changes = FAMILIES[name]
    checkpoint, file = write_both(tmp_path, family, **changes)
    expected = one(load_engine(checkpoint), REQUEST)
    found = one(load_engine(directory_of(file, tmp_path / "store")), REQUEST)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("name", "kind", "of_experts"),
    [
        *(("llama", kind, None) for kind in (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1)),
        ("phi3", Kind.Q8_0, None),
        ("deepseek-v3, groups, yarn", Kind.Q8_0, Kind.Q4_1),
        ("deepseek-v2, groups, yarn", Kind.F16, None),
        ("mistral4", Kind.Q8_0, None),
        ("gpt-oss", Kind.Q8_0, Kind.MXFP4),
        ("gpt-oss", Kind.BF16, Kind.BF16),
        ("llama4, every layer with experts", Kind.Q8_0, None),
        ("mimo-v2", Kind.Q5_0, Kind.MXFP4),
        ("gemma4, keys are values, capped", Kind.Q8_0, None),
        ("gemma4, inputs of layers, shared keys, twice as wide", Kind.Q8_0, None),
        ("gemma4, experts beside a dense part", Kind.Q8_0, Kind.Q5_0),
    ],
)
def test_codes_give_the_tokens_of_the_numbers_that_they_stand_for(
    name: str, kind: Kind, of_experts: Kind | None, tmp_path: Path, unpacked: None
) -> None:
    family, changes = FAMILIES[name]
    checkpoint, file = write_both(tmp_path, family, kind, of_experts=of_experts, **changes)
    expected = one(load_engine(checkpoint), REQUEST)
    directory = directory_of(file, tmp_path / "store")
    assert planned_weights_bytes(directory, "auto", on_cpu=True) > 0
    found = one(load_engine(directory), REQUEST)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        ("qwen2", gguf.MODEL_ARCH.QWEN2VL, "Qwen2_5_VLForConditionalGeneration"),
        ("qwen3, yarn", gguf.MODEL_ARCH.QWEN3VL, "Qwen3VLForConditionalGeneration"),
        ("qwen3moe", gguf.MODEL_ARCH.QWEN3VLMOE, "Qwen3VLMoeForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_model_with_a_tower_computes_what_it_does_alone(
    name: str, architecture: Any, expected: str, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    arch = gguf.MODEL_ARCH_NAMES[architecture]
    extra = {f"{arch}.rope.dimension_sections": [4, 2, 2, 0], f"{arch}.n_deepstack_layers": 3}
    checkpoint, file = write_both(tmp_path, family, extra=extra, architecture=architecture, **changes)
    directory = directory_of(file, tmp_path / "store")
    assert read_config(directory)["architectures"] == [expected]
    alone, found = one(load_engine(checkpoint), REQUEST), one(load_engine(directory), REQUEST)
    assert found.token_ids == alone.token_ids
    assert found.logprobs == alone.logprobs


def test_a_file_of_mistral_large_3_is_read_as_mistral_4(tmp_path: Path) -> None:
    """Its architecture in files is that of DeepSeek."""
    family, changes = FAMILIES["mistral4"]
    extra = {"deepseek2.expert_gating_func": 1, "deepseek2.attention.temperature_scale": 0.3}
    changes = changes | {"rope_parameters": changes["rope_parameters"] | {"llama_4_scaling_beta": 0.3}}
    checkpoint, file = write_both(tmp_path, family, extra=extra, architecture=gguf.MODEL_ARCH.DEEPSEEK2, **changes)
    directory = directory_of(file, tmp_path / "store")
    assert read_config(directory)["architectures"] == ["Mistral4ForCausalLM"]
    assert one(load_engine(directory), REQUEST).logprobs == one(load_engine(checkpoint), REQUEST).logprobs


def test_a_file_with_keys_and_values_in_one_tensor_is_read(tmp_path: Path) -> None:
    """Test files of before April 2025."""
    family, changes = FAMILIES["deepseek-v2, queries at once, tied"]
    checkpoint, file = write_both(tmp_path, family, is_old=True, **changes)
    assert "blk.0.attn_kv_b.weight" in GgufFile.open(file).tensors
    expected, found = (
        one(load_engine(checkpoint), REQUEST),
        one(load_engine(directory_of(file, tmp_path / "store")), REQUEST),
    )
    assert found.logprobs == expected.logprobs


def test_the_directory_has_what_the_files_metadata_says(tmp_path: Path) -> None:
    extra = {"general.sampling.temp": 0.25, "general.sampling.top_k": 17}
    checkpoint, file = write_both(tmp_path, LlamaConfig, Kind.Q8_0, extra)
    directory = directory_of(file, tmp_path / "store")
    found, expected = read_config(directory), read_config(checkpoint)
    for key in (
        "hidden_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "head_dim",
        "vocab_size",
        "num_key_value_heads",
    ):
        assert found[key] == expected[key]
    text = "<|im_start|>user\nThe pilot light, 1234 of them.<|im_end|>"
    assert Tokenizer.from_directory(directory).encode_rendered(text) == Tokenizer.from_directory(
        checkpoint
    ).encode_rendered(text)
    assert ChatTemplate.from_directory(directory).sources == {"default": CHAT_TEMPLATE}
    assert eos_token_ids(directory, found, found["vocab_size"]) == (0, 1)  # <|endoftext|> also ends a turn
    generation = json.loads((directory / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_k"]) == (0.25, 17)
    assert (generation["top_p"], generation["min_p"]) == (0.95, 0.05)  # llama.cpp's, for what the file does not state
    assert read_model(directory, on_cpu=True).quantization is not None
    assert planned_weights_bytes(directory, "auto", on_cpu=True) > 0


def test_a_file_has_one_directory_until_it_changes(tmp_path: Path) -> None:
    _, file = write_both(tmp_path, Qwen3Config)
    first = directory_of(file, tmp_path / "store")
    assert directory_of(file, tmp_path / "store") == first
    os.utime(file, ns=(1, 1))
    assert directory_of(file, tmp_path / "store") != first
    assert len(list((tmp_path / "store").iterdir())) == 2


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "lacks the metadata llama.expert_used_count"),
        ({"split.count": 2}, "is a part of several; join them first"),
        ({"llama.block_count": 10**9}, "has llama.block_count = 1000000000; it may be 1024"),
        ({"llama.rope.scaling.type": "longrope"}, "rotary scaling 'longrope'; supported are linear, yarn and none"),
        ({"llama.rope.dimension_count": 8}, "has 8 as llama.rope.dimension_count and heads of 16"),
        ({"llama.rope.freq_base_swa": 900.0}, "rotates layers with windows by the base 900.0; supported for llama is"),
        ({"llama.attention.causal": False}, "has llama.attention.causal = False, which is not supported for LlamaFor"),
        (
            {"llama.rope.dimension_sections": [2, 3, 3, 0]},
            "the rotary key llama.rope.dimension_sections, which is not known",
        ),
        ({"llama.rope.scaling.alpha": 2.0}, "the rotary key llama.rope.scaling.alpha, which is not known"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "has token 9999 as its bos, and 404 tokens"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, file = write_both(tmp_path, LlamaConfig, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        directory_of(file, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    ("name", "extra", "message"),
    [
        ("deepseek-v3, groups, yarn", {"attention.temperature_scale": 0.1}, "which is not supported for DeepseekV3"),
        ("qwen3moe", {"expert_group_count": 4}, "which is not supported for Qwen3Moe"),
        ("gemma4, keys are values, capped", {"attention.value_length_swa": 8}, "and heads of 16; they must be equal"),
        (
            "gemma4, keys are values, capped",
            {"attention.head_count_kv": [2, 1]},
            "a positive number for each of 4 layers",
        ),
        (
            "gemma4, keys are values, capped",
            {"feed_forward_length": [96, 96, 96, 192]},
            "or those of the last 0 layers twice",
        ),
        ("mimo-v2", {"attention.sliding_window_pattern": [0, 1, 2, 0]}, "it must be a list of true and false"),
        ("mimo-v2", {"attention.key_length": 0}, "it must be a positive whole number"),
        ("llama4, every layer with experts", {"attention.sliding_window": 0}, "supported is 8192"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "which is not supported for Gemma3"),
    ],
)
def test_a_key_that_changes_what_a_family_computes_is_refused_by_name(
    name: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family, changes = FAMILIES[name]
    arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[family.model_type]]  # type: ignore[attr-defined]
    [(key, value)] = extra.items()
    _, file = write_both(tmp_path, family, extra={f"{arch}.{key}": value}, **changes)
    with pytest.raises(CheckpointError, match=f"{arch}.{key} = .*{message}|has 8 as {arch}.{key} {message}"):
        directory_of(file, tmp_path / "store")


def test_heads_with_other_pairs_than_the_file_has_factors_are_refused_by_name(tmp_path: Path) -> None:
    keys = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    extra = {f"llama.{key}": 1 << 31 for key in keys}
    _, file = write_both(tmp_path, LlamaConfig, extra=extra, **FAMILIES["llama, llama3"][1])
    with pytest.raises(CheckpointError, match=r"scales rotary frequencies by rope_freqs\.weight in another way"):
        directory_of(file, tmp_path / "store")


def test_projections_that_do_not_fit_the_heads_are_refused_by_name(tmp_path: Path) -> None:
    family, changes = FAMILIES["deepseek-v3, groups, yarn"]
    _, file = write_both(tmp_path, family, extra={"deepseek2.attention.value_length_mla": 16}, **changes)
    with pytest.raises(CheckpointError, match=r"self_attn\.k_b_proj and .*v_b_proj have shapes"):
        load_engine(directory_of(file, tmp_path / "store"))


@pytest.mark.parametrize("name", ["clip", "mamba", "mamba2", "jamba", "rwkv7"])
def test_another_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"architecture '{name}'; for GGUF files, supported are llama, qwen2"):
        directory_of(tmp_path / "x.gguf", tmp_path / "store")

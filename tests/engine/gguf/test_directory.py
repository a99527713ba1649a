"""A GGUF file gives the same answers as a checkpoint with the same values, for every family and type of codes."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GraniteConfig,
    GraniteMoeConfig,
    LlamaConfig,
    MiniMaxM2Config,
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
from pilotlight.engine.planning.model_plan import planned_weights_bytes, read_model
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.tokenizer import Tokenizer
from pilotlight.engine.weights.config import eos_token_ids, read_config
from tests.checkpoints import CHAT_TEMPLATE
from tests.engine.agreement import full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import YARN
from tests.engine.gguf.files import Kind, write_both

GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 7, "sliding_window": 11, "query_pre_attn_scalar": 16,
    "tie_word_embeddings": True,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}  # fmt: skip
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
    "glm4, biased": (Glm4Config, {
        "attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    }),
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
    ("name", "kind"), [*(("llama", kind) for kind in (Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1)), ("phi3", Kind.Q8_0)]
)
def test_codes_give_the_tokens_of_the_numbers_that_they_stand_for(
    name: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "pilotlight.engine.weights.formats.gguf.library.takes_codes", lambda: False
    )  # no products with codes, as they round their input
    family, changes = FAMILIES[name]
    checkpoint, file = write_both(tmp_path, family, kind, **changes)
    expected = one(load_engine(checkpoint), REQUEST)
    found = one(load_engine(directory_of(file, tmp_path / "store")), REQUEST)
    assert found.token_ids == expected.token_ids
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
        (
            {"llama.rope.scaling.type": "longrope"},
            "rotary scaling 'longrope'; supported are linear, yarn and none",
        ),
        ({"llama.rope.dimension_count": 8}, "has 8 as llama.rope.dimension_count and heads of 16"),
        ({"llama.rope.freq_base_swa": 900.0}, "rotates layers with windows by the base 900.0; supported for llama is"),
        ({"llama.rope.scaling.alpha": 2.0}, "the rotary key llama.rope.scaling.alpha, which is not known"),
        ({"tokenizer.ggml.bos_token_id": 9999}, "has token 9999 as its bos, and 404 tokens"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, file = write_both(tmp_path, LlamaConfig, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        directory_of(file, tmp_path / "store")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("name", ["mamba", "nemotron_h", "nemotron_h_moe", "falcon-h1", "kimi-linear"])
def test_another_architecture_is_refused_by_name(name: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=f"architecture '{name}'; for GGUF files, supported are llama, qwen2"):
        directory_of(tmp_path / "x.gguf", tmp_path / "store")

"""Families read config.json, also with older keys, and tensors; errors name the key or tensor."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3TextConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.weights.config import read_config
from tests.checkpoints import change_config, write_checkpoint
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import FURTHER, MODELS, PACKED, config, write_family

INDEXED = "glm-5, 17 keys, layer 1 shares"
DEEPSEEK, SCOUT = "deepseek-v3, three experts in two of four groups, yarn", "scout, chunks of 16, one of five experts"


GEMMA = "gemma4, inputs of layers, layers 4 to 6 read keys of 2 and 3, twice as wide, capped"
GEMMA_EXPERTS = "gemma4, three of five experts beside a dense part, keys are values"
GLM = "glm-4.5, half of each head turns, normed and biased"
HUNYUAN, SINKS = "hunyuan-moe, three of five experts", "granite-swa, sinks, three bases"
TRINITY = "trinity, gated, windows but in layer 3, three of eight experts"


def test_gemmas_older_keys_mean_the_same(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path,
        config(
            Gemma3TextConfig,
            hidden_activation="gelu_pytorch_tanh",
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=9,
            tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            },
        ),
    )
    request = full("a", random_prompt(40, seed=8), max_tokens=2)
    expected = one(load_engine(tmp_path), request)
    written = json.loads((tmp_path / "config.json").read_text())
    for key in ("layer_types", "rope_parameters", "tie_word_embeddings"):
        del written[key]
    (tmp_path / "config.json").write_text(json.dumps(written))
    change_config(
        tmp_path,
        sliding_window_pattern=2,
        rope_theta=50_000.0,
        rope_local_base_freq=1_000.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    assert one(load_engine(tmp_path), request).logprobs == expected.logprobs


@pytest.mark.parametrize(
    ("name", "architecture", "tower"),
    [
        (DEEPSEEK, "KimiK25ForConditionalGeneration", "vision_tower"),
        (SCOUT, "Llama4ForConditionalGeneration", "vision_model"),
    ],
)
def test_text_beside_a_vision_tower_is_computed_and_the_tower_is_not_read(
    tmp_path: Path, name: str, architecture: str, tower: str
) -> None:
    model, file = write_family(tmp_path, name), tmp_path / "model.safetensors"
    prompt = random_prompt(40, seed=8)
    assert_agrees(model, prompt, one(load_engine(tmp_path), full("a", prompt, max_tokens=2)))
    tensors = {f"language_model.{key}": tensor for key, tensor in load_file(file).items()}
    save_file(tensors | {f"{tower}.patch_embed.proj.weight": torch.zeros(3, 2)}, file)
    written = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "text_config": written}))
    assert_agrees(model, prompt, one(load_engine(tmp_path), full("a", prompt, max_tokens=2)))
    save_file(tensors | {"language_model.model.layers.9.input_layernorm.weight": torch.zeros(42)}, file)
    with pytest.raises(CheckpointError, match=r"language_model\.model\.layers\.9\.input_layernorm\.weight"):
        load_engine(tmp_path)


@pytest.mark.parametrize("name", [DEEPSEEK, GEMMA, GLM, SCOUT])
def test_a_tower_beside_an_architecture_that_has_none_is_refused(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for tower in ("vision_tower", "model.visual", "audio_tower", "mm_projector", "vision_model"):
        save_file(tensors | {f"{tower}.patch_embed.proj.weight": torch.zeros(3, 2)}, file)
        with pytest.raises(CheckpointError, match=rf"does not have: {tower}\.patch_embed\.proj\.weight"):
            load_engine(tmp_path)


def test_keys_and_values_of_layers_that_read_earlier_ones_are_not_read(tmp_path: Path) -> None:
    model, file = write_family(tmp_path, GEMMA), tmp_path / "model.safetensors"
    tensors = load_file(file)
    copies = {
        f"model.layers.5.self_attn.{part}.weight": tensors[f"model.layers.2.self_attn.{part}.weight"] + 1
        for part in ("k_proj", "v_proj", "k_norm")
    }
    save_file(tensors | copies, file)
    prompt = random_prompt(40, seed=8)
    assert_agrees(model, prompt, one(load_engine(tmp_path), full("a", prompt, max_tokens=2)))
    save_file(tensors | {"model.layers.5.self_attn.o_norm.weight": torch.zeros(42)}, file)
    with pytest.raises(CheckpointError, match=r"model\.layers\.5\.self_attn\.o_norm\.weight"):
        load_engine(tmp_path)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path) -> None:
    model, file = write_family(tmp_path, DEEPSEEK), tmp_path / "model.safetensors"
    assert MODELS[DEEPSEEK].num_nextn_predict_layers == 1
    save_file(load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(42, 84)}, file)
    prompt = random_prompt(9, seed=8)
    assert_agrees(model, prompt, one(load_engine(tmp_path), full("a", prompt, max_tokens=2)))


# A tensor of every layout that is fused or stacked when it is read, with its shape according to config.json.
LAYOUTS: dict[str, list[tuple[str, tuple[int, ...]]]] = {
    "qwen3, biased, windows from layer 1": [("self_attn.q_norm.weight", (10,)), ("self_attn.k_proj.bias", (20,))],
    "qwen3-moe, three of five experts, renormalised": [
        ("mlp.experts.4.up_proj.weight", (27, 42)),
        ("mlp.experts.0.down_proj.weight", (42, 27)),
        ("mlp.gate.weight", (5, 42)),
    ],
    "mixtral, two of five experts": [("block_sparse_moe.experts.3.w3.weight", (123, 42))],
    "gemma3, one kv head, untied": [("post_feedforward_layernorm.weight", (42,))],
    "gpt-oss, three of five experts": [
        ("mlp.experts.gate_up_proj", (5, 42, 246)),
        ("mlp.experts.gate_up_proj_bias", (5, 246)),
        ("mlp.experts.down_proj", (5, 123, 42)),
        ("self_attn.sinks", (9,)),
    ],
    DEEPSEEK: [
        ("self_attn.kv_b_proj.weight", (120, 20)),
        ("self_attn.kv_a_layernorm.weight", (20,)),
        ("mlp.gate.e_score_correction_bias", (12,)),
        ("mlp.experts.11.down_proj.weight", (42, 27)),
        ("mlp.shared_experts.up_proj.weight", (54, 42)),
    ],
    SCOUT: [
        ("feed_forward.experts.gate_up_proj", (5, 42, 60)),
        ("feed_forward.experts.down_proj", (5, 30, 42)),
        ("feed_forward.shared_expert.gate_proj.weight", (30, 42)),
    ],
    GEMMA: [
        ("per_layer_input_gate.weight", (6, 42)),
        ("per_layer_projection.weight", (42, 6)),
        ("post_per_layer_input_norm.weight", (42,)),
    ],
    GEMMA_EXPERTS: [
        ("router.proj.weight", (5, 42)),
        ("router.scale", (42,)),
        ("router.per_expert_scale", (5,)),
        ("pre_feedforward_layernorm_2.weight", (42,)),
    ],
    "gpt-oss, experts in mxfp4": [
        ("mlp.experts.gate_up_proj_blocks", (3, 192, 2, 16)),
        ("mlp.experts.down_proj_scales", (3, 64, 3)),
    ],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_missing_misshapen_and_unexpected_tensors_are_named_in_every_layout(tmp_path: Path, name: str) -> None:
    write_family(tmp_path, name)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for part, shape in LAYOUTS[name]:
        tensor = f"model.layers.1.{part}"
        stored = tensors[tensor]
        assert tuple(stored.shape) == shape
        save_file({key: value for key, value in tensors.items() if key != tensor}, file)
        with pytest.raises(CheckpointError, match=f"tensor {tensor} is missing"):
            load_engine(tmp_path)
        save_file(tensors | {tensor: stored[:-1].contiguous()}, file)
        shapes = re.escape(f"has shape {list(stored[:-1].shape)}, but config.json makes it {list(shape)}")
        with pytest.raises(CheckpointError, match=f"tensor {tensor} in model.safetensors {shapes}"):
            load_engine(tmp_path)
        surprise = f"model.layers.1.{part}.surprise"
        save_file(tensors | {surprise: stored.clone()}, file)
        with pytest.raises(CheckpointError, match=surprise):
            load_engine(tmp_path)


def test_the_published_name_of_gemmas_activation_means_its_approximation(tmp_path: Path) -> None:
    write_family(tmp_path, "gemma, tied")
    request = full("a", random_prompt(20, seed=8), max_tokens=2)
    expected = one(load_engine(tmp_path), request)
    change_config(tmp_path, hidden_act="gelu")
    assert one(load_engine(tmp_path), request).logprobs == expected.logprobs


@pytest.mark.parametrize("thinker", [None, {}, {"text_config": 3}])
def test_an_omni_model_without_a_decoder_is_refused(thinker: object) -> None:
    raw = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": thinker}
    with pytest.raises(CheckpointError, match="it must be an object with text_config"):
        find_family(raw).parse_config(raw)


def test_a_scale_that_is_no_number_is_named_by_its_tensor(tmp_path: Path) -> None:
    write_family(tmp_path, PACKED)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.2.mlp.experts.down_proj_scales"
    tensors[name][1, 5, 2] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name} in model.safetensors holds NaN or infinity"):
        load_engine(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3, yarn, tied", {"layer_types": ["full_attention"]}, "1 layer_types for num_hidden_layers = 3"),
        ("qwen3, yarn, tied", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
         "'chunked_attention'; supported are full_attention, sliding_attention"),
        ("mistral, window", {"sliding_window": 0}, "sliding_window = 0"),
        ("mixtral, two of five experts", {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 of 5 experts"),
        ("qwen3-moe, one dense layer, biased, window", {"mlp_only_layers": [3]}, r"mlp_only_layers = \[3\]"),
        ("qwen3-moe, one dense layer, biased, window", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("gemma3, one kv head, untied", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu'; supported"),
        ("gemma3, one kv head, untied", {"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ("gemma3, one kv head, untied", {"rope_parameters": {"rope_type": "linear"}}, "an object per layer type"),
        ("gemma3, one kv head, untied", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
        ("gpt-oss, three of five experts", {"quantization_config": {"quant_method": "mxfp4"}},
         "hidden_size 42 and intermediate_size 123: mxfp4 keeps 32"),
        ("gpt-oss, three of five experts", {"quantization_config": {"quant_method": "gptq"}},
         r"quantized \(gptq\); supported for GptOssForCausalLM are float32, float16, bfloat16, mxfp4"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func = 'softmax'; supported for DeepseekV3ForCausalLM is 'sigmoid'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method = 'greedy'; supported"),
        (DEEPSEEK, {"n_group": 5}, "n_group = 5, topk_group = 2 and num_experts_per_tok = 3 for 12 experts: groups must have equal sizes"),
        (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 4}, "the chosen groups at least num_experts_per_tok experts"),
        (DEEPSEEK, {"attention_bias": True}, "attention_bias = True"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave = False"),
        (DEEPSEEK, {"qk_rope_head_dim": 7}, "head_dim 7.*head_dim even"),
        (INDEXED, {"q_lora_rank": None}, "q_lora_rank = None, index_head_dim = 11 and qk_rope_head_dim = 6: an index of keys needs reduced"),
        (INDEXED, {"index_head_dim": 4}, "index_head_dim = 4 and qk_rope_head_dim = 6: an index of keys needs reduced queries, and heads"),
        (INDEXED, {"indexer_types": ["shared", "full", "full"]}, "indexer_types = .*of which the first is full"),
        (INDEXED, {"indexer_types": ["full"]}, "indexer_types = .*they must be 3"),
        (INDEXED, {"indexer_rope_interleave": False}, "indexer_rope_interleave = False; supported for GlmMoeDsaForCausalLM is True"),
        ("deepseek-v3.2, 32 keys, all layers of experts, tied", {"indexer_rope_interleave": True},
         "indexer_rope_interleave = True; supported for DeepseekV32ForCausalLM is False"),
        (INDEXED, {"index_topk": 0}, "index_topk = 0; it must be a positive whole number"),
        (DEEPSEEK, {"kv_lora_rank": None}, "kv_lora_rank = None; it must be a positive whole number"),
        (GLM, {"partial_rotary_factor": 0.3, "rope_parameters": None}, "partial_rotary_factor = 0.3, by which 3 numbers"),
        (GLM, {"rope_parameters": 3}, "rotary parameters 3; they must be an object"),
        (GLM, {"first_k_dense_replace": "x"}, "first_k_dense_replace = 'x'; it must be a whole number from 0 to 3"),
        (GLM, {"n_shared_experts": -1}, "n_shared_experts = -1; it must be a whole number from 0 to 12"),
        (DEEPSEEK, {"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers = 1000000000"),
        (SCOUT, {"moe_layers": [[1]]}, r"moe_layers = \[\[1\]\]; they must be layers below 4"),
        (GLM, {"n_routed_experts": 0}, "n_routed_experts = 0"),
        (SCOUT, {"moe_layers": [1, 4]}, r"moe_layers = \[1, 4\]; they must be layers below 4"),
        (SCOUT, {"no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\]; it must be a list of 4"),
        (SCOUT, {"layer_types": ["full_attention"] * 4}, "layer_types = .*supported for Llama4ForCausalLM is"),
        (SCOUT, {"floor_scale": 0}, "floor_scale = 0"),
        (SCOUT, {"num_experts_per_tok": 6}, "num_experts_per_tok = 6 of 5 experts"),
        (SCOUT, {"text_config": [1]}, r"text_config = \[1\]; it must be an object"),
        ("gpt-oss, three of five experts", {"rope_parameters": {"rope_type": "dynamic"}}, "'dynamic'; supported are"),
        (GEMMA, {"num_kv_shared_layers": 6}, "num_kv_shared_layers = 6, and no earlier layer of type full_attention has keys"),
        (GEMMA, {"num_kv_shared_layers": 8}, "num_kv_shared_layers = 8; it must be a whole number from 0 to 7"),
        (GEMMA, {"vocab_size_per_layer_input": 430}, "vocab_size_per_layer_input = 430; it must be at least vocab_size, 431"),
        (GEMMA, {"pad_token_id": 440}, "pad_token_id = 440; it must be a whole number from 0 to 439"),
        (GEMMA, {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input = -1; it must be a positive whole number"),
        (GEMMA, {"use_double_wide_mlp": 2}, "use_double_wide_mlp = 2"),
        (GEMMA_EXPERTS, {"top_k_experts": 6}, "top_k_experts = 6 of 5 experts"),
        (GEMMA_EXPERTS, {"top_k_experts": None}, "top_k_experts = None; it must be a positive whole number"),
        (GEMMA_EXPERTS, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'; supported"),
        ("hunyuan, normed after turning", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'; supported are"),
        ("hunyuan, normed after turning", {"use_cla": True}, "use_cla = True; supported for HunYuanDenseV1ForCausalLM is False"),
        (HUNYUAN, {"moe_topk": [3, 3, 2]}, r"moe_topk = \[3, 3, 2\]; it must be the same for all layers"),
        (HUNYUAN, {"num_shared_expert": [2, 2, 2]}, "num_shared_expert = 2; supported for .* is None or 1"),
        (HUNYUAN, {"moe_intermediate_size": [9, 9, 9]}, "moe_intermediate_size = 9; supported for .* is None or 31"),
        (SINKS, {"layer_rope_theta": [1.0]}, r"layer_rope_theta = \[1.0\]; it must be a list of 4 bases"),
        (SINKS, {"layer_rope_theta": [1.0, -1.0, 1.0, 1.0]}, "it must be a list of 4 bases"),
        (SINKS, {"layer_rope_theta": [1.0, "a", 1.0, 1.0]}, "it must be a list of 4 bases"),
        (TRINITY, {"route_norm": False}, "route_norm = False; supported for AfmoeForCausalLM is True"),
        (TRINITY, {"num_dense_layers": 5}, "num_dense_layers = 5; it must be a whole number from 0 to 4"),
        ("apertus, learned activations", {"hidden_act": "silu"}, "hidden_act = 'silu'; supported for ApertusForCausalLM is 'xielu'"),
        ("gemma, tied", {"hidden_act": "relu"}, "hidden_activation = 'relu'"),
        ("cohere, two parts at once, logits scaled", {"logit_scale": -1.0}, "logit_scale = -1.0; it must be a positive number"),
    ],
)  # fmt: skip
def test_a_configuration_beyond_the_family_is_refused(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    written = (MODELS | FURTHER)[name].to_dict()
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[written["model_type"]]
    (tmp_path / "config.json").write_text(json.dumps(written | {"architectures": [architecture]}))
    raw = read_config(tmp_path)
    find_family(raw).parse_config(raw)  # the unchanged config is valid
    change_config(tmp_path, **changes)
    raw = read_config(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        find_family(raw).parse_config(raw)

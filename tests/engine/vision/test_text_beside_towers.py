"""Checkpoints with a vision tower that the engine does not support: text answers equal those of `transformers`, and the tower is not read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMultimodalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Glm4vConfig,
    Glm4vMoeConfig,
    Mistral3Config,
    Phi4MultimodalConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3OmniMoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from pilotlight.engine.api.errors import CheckpointError
from tests.checkpoints import AWKWARD, change_config, change_tensors, give_values
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import drain, load_engine, one, random_prompt
from tests.engine.families import DELTA, LATENT, YARN

HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
MIXED = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 2, 1]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 27}
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14
}  # fmt: skip
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 42, "patch_size": 14}
IDS = {"image_token_id": 420, "video_token_id": 421, "vision_start_token_id": 422, "vision_end_token_id": 423}


def text(**changes: Any) -> dict[str, Any]:
    """Return the settings of a text config of awkward sizes; a setting that is None keeps the family's default."""
    return {key: value for key, value in (AWKWARD | changes).items() if value is not None or key == "sliding_window"}


def mistral3(kind: str, **changes: Any) -> Mistral3Config:
    return Mistral3Config(
        text_config=text(model_type=kind, **changes),
        vision_config=PIXTRAL,
        image_token_index=420,
        tie_word_embeddings=False,
    )


MODELS: dict[str, PreTrainedConfig] = {
    "mistral small 3": mistral3("mistral", sliding_window=None),
    "ministral 3": mistral3(
        "ministral3", sliding_window=None, rope_parameters=YARN | {"llama_4_scaling_beta": 0.1}, num_key_value_heads=1
    ),
    "mistral small 4": mistral3(
        "mistral4",
        **LATENT,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.3,
        first_k_dense_replace=1,
        rope_parameters=YARN
        | {"original_max_position_embeddings": 9, "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "gemma 3": Gemma3Config(
        text_config=Gemma3TextConfig(**text(
            hidden_activation="gelu_pytorch_tanh", sliding_window=12, query_pre_attn_scalar=7, rope_parameters=None
        )).to_dict(),
        vision_config=SIGLIP,
        mm_tokens_per_image=4,
        image_token_index=420,
        boi_token_index=421,
        eoi_token_index=422,
    ),
    "gemma 4": Gemma4Config(
        text_config=Gemma4TextConfig(**text(
            hidden_activation="gelu_pytorch_tanh", sliding_window=12, hidden_size_per_layer_input=6, vocab_size_per_layer_input=431,
            num_kv_shared_layers=1, layer_types=["full_attention", "sliding_attention", "full_attention"], global_head_dim=12,
            rope_parameters=None,
        )).to_dict(),
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
        },
        audio_config=None,
    ),
    "qwen 2.5 vl": Qwen2_5_VLConfig(
        text_config=text(head_dim=None, hidden_size=60, rope_parameters=MIXED), vision_config=QWEN | {"out_hidden_size": 60}, **IDS
    ),
    "qwen 3 vl": Qwen3VLConfig(
        text_config=text(rope_parameters=MIXED),
        vision_config=QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen 3 vl, experts": Qwen3VLMoeConfig(
        text_config=text(rope_parameters=MIXED, norm_topk_prob=True, **EXPERTS),
        vision_config=QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4},
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen 3.5": Qwen3_5Config(
        text_config=text(**DELTA, layer_types=["linear_attention", "full_attention", "linear_attention"]),
        vision_config=QWEN | {"num_position_embeddings": 4},
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen 3.5, experts": Qwen3_5MoeConfig(
        text_config=text(
            **DELTA,
            **EXPERTS,
            shared_expert_intermediate_size=11,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        ),
        vision_config=QWEN | {"num_position_embeddings": 4},
        tie_word_embeddings=False,
        **IDS,
    ),
    "glm 4.1 v": Glm4vConfig(
        text_config=text(head_dim=None, hidden_size=72, rope_parameters=HALF | {"mrope_section": [1, 1, 1]}),
        vision_config=QWEN | {"image_size": 28, "out_hidden_size": 72},
        tie_word_embeddings=False,
    ),
    "glm 4.5 v": Glm4vMoeConfig(
        text_config=text(
            head_dim=12,
            rope_parameters=HALF | {"mrope_section": [1, 1, 1]},
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=27,
            first_k_dense_replace=1,
            attention_bias=True,
        ),
        vision_config=QWEN | {"image_size": 28},
        tie_word_embeddings=False,
    ),
    "phi 4 multimodal": Phi4MultimodalConfig(
        **text(head_dim=None, hidden_size=60, sliding_window=None),
        vision_config={
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "crop_size": 28,
            "image_token_id": 420, "feature_layer": -1,
        },
        audio_config={
            "hidden_size": 16, "intermediate_size": 24, "num_blocks": 1, "num_attention_heads": 2, "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16, "input_size": 8, "nemo_conv_channels": 16, "audio_token_id": 421, "feature_layer": -1,
        },
    ),
    "qwen 3 omni": Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": text(rope_parameters=MIXED | {"mrope_interleaved": True}, **EXPERTS),
            "vision_config": QWEN | {"deepstack_visual_indexes": [0], "num_position_embeddings": 4, "out_hidden_size": 42},
            "audio_config": {
                "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 24, "d_model": 16, "output_dim": 42,
                "downsample_hidden_size": 4, "n_window": 4,
            },
        },
        enable_audio_output=False,
    ),
}  # fmt: skip


def write(directory: Path, name: str) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForMultimodalLM.from_config(MODELS[name], dtype=torch.float32).eval()
    give_values(model)
    model.save_pretrained(directory)
    return model.thinker if name == "qwen 3 omni" else model  # the whole model has no method that computes logits


@pytest.mark.parametrize("name", MODELS)
def test_text_beside_a_tower_agrees(tmp_path: Path, name: str) -> None:
    model = write(tmp_path, name)
    engine = load_engine(tmp_path, dtype="float32", max_num_batched_tokens=24)
    prompts = {"a": random_prompt(61, seed=2), "b": random_prompt(5, seed=5)}
    prompts = {
        key: [token % 400 for token in prompt] for key, prompt in prompts.items()
    }  # below the ids of image tokens
    heard = drain(engine, [full(key, prompt, max_tokens=4) for key, prompt in prompts.items()])
    for key, prompt in prompts.items():
        assert_agrees(model, prompt, heard[key])


def test_a_tower_without_the_tensor_by_which_it_is_found_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "gemma 3")

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[next(name for name in tensors if name.endswith("mm_input_projection_weight"))]

    change_tensors(tmp_path, remove)
    with pytest.raises(CheckpointError, match="multi_modal_projector"):
        load_engine(tmp_path, dtype="float32")


def test_phi_4_multimodal_agrees_with_the_names_and_adapters_that_microsoft_publishes(tmp_path: Path) -> None:
    model = write(tmp_path, "phi 4 multimodal")

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers." in name and name.endswith("_proj.weight")]:
            stem = name.removesuffix(".weight")
            tensors[f"{stem}.base_layer.weight"] = tensors.pop(name)
            for part in ("lora_A", "lora_B"):
                tensors |= {f"{stem}.{part}.{kind}.weight": torch.ones(2, 2) for kind in ("vision", "speech")}

    change_tensors(tmp_path, rename)
    change_config(tmp_path, architectures=["Phi4MMForCausalLM"])
    prompt = [token % 400 for token in random_prompt(40, seed=2)]
    assert_agrees(model, prompt, one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=4)))


def test_stacks_of_experts_agree_turned_as_qwen_publishes_them(tmp_path: Path) -> None:
    model = write(tmp_path, "qwen 3 vl, experts")

    def turn(tensors: dict[str, torch.Tensor]) -> None:
        stacks = [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
        assert len(stacks) == 6
        tensors.update({name: tensors[name].transpose(1, 2).contiguous() for name in stacks})

    change_tensors(tmp_path, turn)
    prompt = [token % 400 for token in random_prompt(40, seed=2)]
    assert_agrees(model, prompt, one(load_engine(tmp_path, dtype="float32"), full("a", prompt, max_tokens=4)))

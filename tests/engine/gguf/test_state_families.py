"""GGUF files of models whose layers have states give the answers of transformers, and codes those of their numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    FalconH1Config,
    GraniteMoeHybridConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.planning.model_plan import planned_weights_bytes, read_model
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt
from tests.engine.families import DELTA, FURTHER, NEMOTRON, config
from tests.engine.gguf.files import SHAPE, Kind
from tests.engine.gguf.state_files import write_states

PLAIN: dict[str, Any] = SHAPE | {"num_hidden_layers": 3, "head_dim": None}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
QWEN: dict[str, Any] = DELTA | SHAPE | {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
GRANITE: dict[str, Any] = PLAIN | MAMBA | {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "residual_multiplier": 0.6, "attention_multiplier": 0.4,
    "embedding_multiplier": 1.5, "logits_scaling": 1.2,
}  # fmt: skip
NEMOTRON_MOE: dict[str, Any] = SHAPE | NEMOTRON | {
    "mamba_num_heads": 8, "mamba_head_dim": 16, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.7, "moe_intermediate_size": 32, "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
# Sizes are multiples of a block of codes.
CODED: dict[str, PreTrainedConfig] = {
    "lfm2": config(Lfm2Config, **PLAIN, layer_types=["full_attention", "conv", "conv"], tie_word_embeddings=True),
    "lfm2moe": config(
        Lfm2MoeConfig, **PLAIN | EXPERTS, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1, tie_word_embeddings=True
    ),
    "qwen3next": config(Qwen3NextConfig, **QWEN | EXPERTS, shared_expert_intermediate_size=64),
    "qwen35": config(Qwen3_5TextConfig, **QWEN),
    "qwen35moe": config(Qwen3_5MoeTextConfig, **QWEN | EXPERTS, shared_expert_intermediate_size=64, tie_word_embeddings=True),
    "granite-4": config(GraniteMoeHybridConfig, **GRANITE, num_local_experts=0, shared_intermediate_size=96),
    "granite-4 with experts": config(
        GraniteMoeHybridConfig, **GRANITE, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32, tie_word_embeddings=True
    ),
    "falcon-h1": config(FalconH1Config, **SHAPE | MAMBA, mamba_d_ssm=128, attention_in_multiplier=1.3, mlp_multipliers=[0.9, 0.6]),
    "kimi-linear": config(
        KimiLinearConfig, **PLAIN | {"num_key_value_heads": 4}, q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16,
        v_head_dim=32, moe_intermediate_size=32, rope_parameters=None, layer_types=["linear_attention", "full_attention", "linear_attention"],
        initializer_range=0.1, linear_num_heads=4, linear_head_dim=32, num_local_experts=4, num_experts_per_tok=2, routed_scaling_factor=1.4,
        mlp_layer_types=["dense", "sparse", "sparse"],
    ),
    "nemotron-h with experts": config(NemotronHConfig, **NEMOTRON_MOE),
    "nemotron-h": config(
        NemotronHConfig,
        **NEMOTRON_MOE | {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "moe_latent_size": None},
    ),
}  # fmt: skip
FAMILIES = CODED | {
    "lfm2moe, one kv head": config(
        Lfm2MoeConfig, layer_types=["full_attention", "conv", "conv"], head_dim=None, num_attention_heads=7, num_key_value_heads=1,
        num_dense_layers=2, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=27, tie_word_embeddings=True,
    ),
} | {
    name: FURTHER[name]
    for name in (
        "lfm2, attention in layer 1",
        "qwen3-next, attention in layer 1, three of five experts",
        "qwen3.5, one kv head, attention in layer 0, tied",
        "qwen3.5-moe, two of four experts",
        "granite-4, attention in layer 1",
        "falcon-h1, scaled at each seam",
        "falcon-h1, one kv head, normed, biased, tied",
        "nemotron-h, no experts, a feed-forward first, biased",
    )
}  # fmt: skip
PROMPT = random_prompt(40, seed=8)
REQUEST = full("a", PROMPT, max_tokens=6)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_gives_the_answers_of_transformers(name: str, tmp_path: Path) -> None:
    model, file, _ = write_states(tmp_path, FAMILIES[name])
    assert_agrees(model, PROMPT, one(load_engine(directory_of(file, tmp_path / "store")), REQUEST))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", CODED)
def test_codes_give_the_answers_of_the_numbers_that_they_stand_for(
    name: str, kind: Kind, tmp_path: Path, unpacked: None
) -> None:
    _, coded, plain = write_states(tmp_path, CODED[name], kind)
    expected = one(load_engine(directory_of(plain, tmp_path / "plain")), REQUEST)
    found = one(load_engine(directory_of(coded, tmp_path / "coded")), REQUEST)
    assert found.token_ids == expected.token_ids
    assert found.logprobs == expected.logprobs


def test_files_of_2025_of_qwen3_next_have_the_rows_of_checkpoints(tmp_path: Path) -> None:
    def join(keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
        del keys["attention.recurrent_layers"]
        keys["full_attention_interval"] = 2
        for layer in (0, 2):
            qkv, gate = (tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in ("qkv", "gate"))
            parts = [*qkv.split([32, 32, 96]), gate]  # of 2 key heads
            rows = torch.cat([part.unflatten(0, (2, -1)) for part in parts], 1)
            tensors[f"blk.{layer}.ssm_in.weight"] = rows.flatten(0, 1)

    types = ["linear_attention", "full_attention"] * 2
    shared = EXPERTS | {"shared_expert_intermediate_size": 64, "num_hidden_layers": 3, "layer_types": types[:3]}
    model, file, _ = write_states(tmp_path, config(Qwen3NextConfig, **QWEN | shared), changes=join)
    assert_agrees(model, PROMPT, one(load_engine(directory_of(file, tmp_path / "store")), REQUEST))


def test_the_weights_of_a_file_are_planned(tmp_path: Path) -> None:
    _, file, _ = write_states(tmp_path, CODED["qwen35"], Kind.Q8_0)
    planned = planned_weights_bytes(directory_of(file, tmp_path / "store"), "auto", on_cpu=True)
    assert planned == pytest.approx(file.stat().st_size, rel=0.2)


@pytest.mark.parametrize(("name", "takes_adapters"), [("qwen35", False), ("falcon-h1", False), ("granite-4", True)])
def test_adapters_are_refused_where_weights_are_not_those_of_the_original(
    name: str, takes_adapters: bool, tmp_path: Path
) -> None:
    _, file, _ = write_states(tmp_path, CODED[name])
    directory = directory_of(file, tmp_path / "store")
    assert bool(read_model(directory, on_cpu=True).adapted_shapes()) is takes_adapters
    assert bool(load_engine(directory).runner.model.projections) is takes_adapters  # type: ignore[attr-defined]


def _key(name: str, value: Any) -> Callable[..., None]:
    return lambda keys, tensors: keys.update({name: value})


def _rise(keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["blk.0.ssm_a"][0] = 0.5


def _cut(keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["blk.0.ssm_ba.weight"] = tensors["blk.0.ssm_ba.weight"][1:].clone()


def _bias(keys: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    tensors["blk.0.ssm_x.weight"] = torch.ones(64)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", _key("attention.sliding_window", 8), "has windows, which are not supported for lfm2"),
        ("lfm2", _key("attention.causal", False), "lfm2.attention.causal = False, which is not supported"),
        ("lfm2", _key("attention.head_count_kv", [0, 2]), "a whole number for each of 3 layers"),
        ("lfm2moe", _key("expert_gating_func", 1), "lfm2moe.expert_gating_func = 1; supported is 2, sigmoids"),
        ("granite-4", _key("rope.scaling.finetuned", True), "rotates queries and keys, which is not supported for granitehybrid"),
        ("granite-4", _key("ssm.inner_size", 130), "granitehybrid.ssm.inner_size = 130; it must be a multiple of 64"),
        ("qwen35", _key("ssm.time_step_rank", 5), "qwen35.ssm.inner_size = 96; it must be a multiple of 5"),
        ("qwen35", _rise, "tensor blk.0.ssm_a in coded.gguf must hold negative numbers"),
        ("qwen3next", _cut, "tensor blk.0.ssm_ba.weight in coded.gguf has 11 rows for 2 key heads"),
        ("nemotron-h", _bias, "has the tensor blk.0.ssm_x.weight, which no NemotronHForCausalLM has"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(
    name: str, changes: Callable[..., None], message: str, tmp_path: Path
) -> None:
    _, file, _ = write_states(tmp_path, CODED[name], changes=changes)
    with pytest.raises(CheckpointError, match=message):
        directory_of(file, tmp_path / "store")
    assert not (tmp_path / "store").exists()

"""The config of files that lack keys: older files, and families that share the name of an architecture."""

import struct
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.architectures import describe
from pilotlight.engine.gguf.file import GgufFile, GgufTensor
from pilotlight.engine.gguf.kinds import KINDS

SIZES: dict[str, Any] = {
    "block_count": 62, "context_length": 4096, "embedding_length": 64, "feed_forward_length": 96, "attention.head_count": 4,
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 24, "attention.value_length": 16, "attention.kv_lora_rank": 32,
    "rope.dimension_count": 8, "rope.freq_base": 1e4, "expert_count": 256, "expert_used_count": 8, "expert_feed_forward_length": 32,
}  # fmt: skip


def config(
    tensors: tuple[str, ...] = (),
    pre: str = "deepseek-v3",
    path: Path = Path("tiny.gguf"),
    arch: str = "deepseek2",
    **changes: Any,
) -> dict[str, Any]:
    metadata = {f"{arch}.{key}": value for key, value in (SIZES | changes).items()}
    metadata |= {"general.architecture": arch, "tokenizer.ggml.pre": pre}
    stored = {name: GgufTensor(name, KINDS[0], (12,), 0, 48) for name in tensors}
    stored["token_embd.weight"] = GgufTensor("token_embd.weight", KINDS[0], (431, 64), 0, 431 * 256)
    return describe(GgufFile(path, metadata, stored)).config


BIAS = ("blk.3.exp_probs_b.bias",)


@pytest.mark.parametrize(
    ("tensors", "changes", "architecture"),
    [
        ((), {}, "DeepseekV2ForCausalLM"),
        (BIAS, {}, "DeepseekV3ForCausalLM"),
        (BIAS, {"pre": "glm4"}, "Glm4MoeLiteForCausalLM"),
        ((), {"expert_gating_func": 2}, "DeepseekV3ForCausalLM"),
        ((), {"expert_gating_func": 1}, "DeepseekV2ForCausalLM"),
    ],
)
def test_the_scores_of_experts_decide_the_family(
    tensors: tuple[str, ...], changes: dict[str, Any], architecture: str
) -> None:
    assert config(tensors, **changes)["architectures"] == [architecture]


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({}, (8, 4)),
        ({"expert_count": 160}, (8, 3)),
        ({"expert_count": 64}, (1, 1)),
        ({"expert_group_count": 2, "expert_group_used_count": 1}, (2, 1)),
    ],
)
def test_older_files_have_the_groups_of_the_published_models(changes: dict[str, Any], groups: tuple[int, int]) -> None:
    found = config(**changes)
    assert (found["n_group"], found["topk_group"]) == groups


def test_files_with_keys_and_values_in_one_tensor_have_the_sizes_of_heads_elsewhere() -> None:
    old, new = config(), config(**{"attention.key_length_mla": 40, "attention.value_length_mla": 12})
    assert (old["qk_nope_head_dim"], old["v_head_dim"]) == (16, 16)
    assert (new["qk_nope_head_dim"], new["v_head_dim"]) == (32, 12)


def test_layers_that_predict_further_tokens_are_not_counted() -> None:
    assert config(nextn_predict_layers=1)["num_hidden_layers"] == 61


@pytest.mark.parametrize("first", [2.0, 0.0, -1.0, 1e30, float("inf"), float("nan")])
def test_other_factors_of_rotary_frequencies_are_refused(first: float, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(struct.pack("<12f", first, *[1.0] * 11))
    heads = {"expert_count": 0, "attention.value_length": 24, "rope.dimension_count": 24}
    with pytest.raises(CheckpointError, match=r"scales rotary frequencies by rope_freqs\.weight in another way"):
        config(("rope_freqs.weight",), path=tmp_path / "tiny.gguf", arch="llama", **heads)

"""Four ranks compute what one does, however they share a model: its matrices, its layers, its experts, or two of these."""

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from transformers import DeepseekV3Config, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen3MoeConfig

from tests.checkpoints import write_checkpoint
from tests.engine.driver import drain, load_engine, random_prompt, submit
from tests.engine.families import LATENT, config
from tests.engine.parallel.test_ranks import Ranks, assert_same, ranks, several

__all__ = ["ranks"]

MODELS: dict[str, PreTrainedConfig] = {  # four layers, heads and experts at least, by which each sharing divides them
    "dense": config(LlamaConfig, hidden_size=40, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4),
    "windows": config(
        MistralConfig,
        hidden_size=40,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=7,
    ),
    "experts": config(
        Qwen3MoeConfig,
        hidden_size=40,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=28,
    ),
    "latent": config(
        DeepseekV3Config,
        **LATENT | {"num_attention_heads": 8, "num_key_value_heads": 8},
        hidden_size=40,
        num_hidden_layers=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}
WITH_EXPERTS = ("experts", "latent")


def sharing(models: tuple[str, ...], **how: int) -> list[ParameterSet]:
    name = " ".join(f"{key} {value}" for key, value in how.items())
    return [pytest.param({"size": 4} | how, model, id=f"{model}, {name or 'tensors'}") for model in models]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "model"),
    [
        *sharing((*MODELS,)),
        *sharing((*MODELS,), stages=4),
        *sharing((*MODELS,), stages=2),
        *sharing(WITH_EXPERTS, expert_parallel=True),
        *sharing(WITH_EXPERTS, expert_parallel=True, stages=2),
        *sharing(WITH_EXPERTS, expert_parallel=True, data_parallel=4),
        *sharing(WITH_EXPERTS, expert_parallel=True, data_parallel=2),
        *sharing(WITH_EXPERTS, expert_parallel=True, data_parallel=2, stages=2),
    ],
    indirect=["ranks"],
)
def test_four_ranks_compute_the_logits_of_one(tmp_path: Path, ranks: Ranks, model: str) -> None:
    write_checkpoint(tmp_path, MODELS[model])
    asked = several(prompt_logprobs=True)  # greedy ones beside one whose tokens are drawn
    asked.append(submit("drawn", random_prompt(31, seed=9), max_tokens=12, temperature=0.9, seed=5, num_logprobs=3))
    expected = drain(load_engine(tmp_path), asked)
    with ranks.loaded(tmp_path) as four:
        assert_same(drain(four.engine, asked), expected)

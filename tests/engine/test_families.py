"""Every model family against `transformers`, along every path a token can take through the scheduler and the cache.

Sizes are awkward on purpose; windows are shorter than the prompts, so that every path crosses them.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import (
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.checkpoints import AWKWARD, LLAMA3_SCALING, write_checkpoint
from tests.engine.agreement import assert_agrees, full
from tests.engine.driver import drain, load_engine, one, random_prompt

UNSET = ("bos_token_id", "sliding_window")  # whose None is a value
YARN = {
    "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64
}  # fmt: skip


def config(kind: type[PreTrainedConfig], **changes: Any) -> PreTrainedConfig:
    """None leaves a setting to the family's own default."""
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
}


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("family")
    return directory, write_checkpoint(directory, MODELS[request.param])


def test_a_whole_prompt_and_its_continuation_agree(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    prompt = random_prompt(77, seed=1)
    heard = one(load_engine(directory), full("a", prompt, max_tokens=9, prompt_logprobs=True))
    assert len(heard.logprobs) == 9
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 76
    assert_agrees(model, prompt, heard)


@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_a_chunked_prompt_agrees(written: tuple[Path, PreTrainedModel], budget: int) -> None:
    directory, model = written
    engine = load_engine(directory, max_num_batched_tokens=budget)
    prompt = random_prompt(61, seed=2)
    heard = one(engine, full("a", prompt, max_tokens=4, prompt_logprobs=True))
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 60
    assert_agrees(model, prompt, heard)


def test_sequences_in_one_batch_agree_each_for_itself(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory, max_num_batched_tokens=64, block_size=5)
    prompts = {str(n): random_prompt(n, seed=n) for n in (1, 4, 5, 33, 70)}
    heard = drain(engine, [full(name, prompt, max_tokens=6) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(model, prompt, heard[name])


def test_a_prefix_hit_agrees(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory)
    prompt = random_prompt(64, seed=3)
    first = one(engine, full("a", prompt, max_tokens=4))
    again = one(engine, full("b", prompt, max_tokens=4))
    longer = one(engine, full("c", prompt + random_prompt(21, seed=4), max_tokens=4))
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 48, 64)
    assert_agrees(model, prompt, again)
    assert_agrees(model, prompt + random_prompt(21, seed=4), longer)


def test_preempted_sequences_agree(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory, kv_tokens=144, max_num_batched_tokens=40)
    prompts = {str(n): random_prompt(n, seed=n) for n in (30, 31, 32)}
    heard = drain(engine, [full(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert len(heard[name].token_ids) == 30
        assert_agrees(model, prompt, heard[name])

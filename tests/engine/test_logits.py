"""The engine's distributions against `transformers`, along every path a token can take through the scheduler and the cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from engine.engine import Engine
from engine.protocol import TokenLogprobs
from tests.checkpoints import LLAMA3_SCALING, write_llama
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit

VOCAB = 431
TOLERANCE = 1e-4

MODELS: dict[str, dict[str, Any]] = {
    "six heads over two": {},
    "three heads over one, tied": {
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14, "tie_word_embeddings": True
    },
    "biased": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
    "llama3 scaling": {"rope_parameters": LLAMA3_SCALING},
    "linear scaling": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}},
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LlamaForCausalLM]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_llama(directory, **MODELS[request.param])


def as_distribution(reported: TokenLogprobs) -> torch.Tensor:
    distribution = torch.full((VOCAB,), torch.nan)
    ids, logprobs = zip(*reported.top, strict=True)
    distribution[list(ids)] = torch.tensor(logprobs)
    return distribution


def assert_agrees(model: LlamaForCausalLM, prompt: list[int], heard: Heard) -> None:
    """Every reported distribution, of prompt and output, against one pass of the reference over the whole text."""
    assert heard.error is None
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + heard.token_ids])).logits[0]
    expected = logits.log_softmax(-1)
    for i, reported in enumerate(heard.logprobs):
        row = expected[len(prompt) + i - 1]
        assert (as_distribution(reported) - row).abs().max() <= TOLERANCE, f"output token {i}"
        assert abs(reported.logprob - row[heard.token_ids[i]]) <= TOLERANCE
    for i, reported in enumerate(heard.prompt_logprobs or ()):
        assert (as_distribution(reported) - expected[i]).abs().max() <= TOLERANCE, f"prompt token {i + 1}"
        assert abs(reported.logprob - expected[i][prompt[i + 1]]) <= TOLERANCE


def full(sequence_id: str, prompt: list[int], **sampling: Any) -> Any:
    return submit(sequence_id, prompt, num_logprobs=VOCAB, **sampling)


def test_a_whole_prompt_and_its_continuation_agree(written: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = written
    prompt = random_prompt(77, seed=1)
    heard = one(load_engine(directory), full("a", prompt, max_tokens=9, prompt_logprobs=True))
    assert len(heard.logprobs) == 9
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 76
    assert_agrees(model, prompt, heard)


@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_a_chunked_prompt_agrees(written: tuple[Path, LlamaForCausalLM], budget: int) -> None:
    directory, model = written
    engine = load_engine(directory, max_num_batched_tokens=budget)
    prompt = random_prompt(61, seed=2)
    heard = one(engine, full("a", prompt, max_tokens=4, prompt_logprobs=True))
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 60
    assert_agrees(model, prompt, heard)


def test_sequences_in_one_batch_agree_each_for_itself(written: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = written
    engine = load_engine(directory, max_num_batched_tokens=64, block_size=5)
    prompts = {str(n): random_prompt(n, seed=n) for n in (1, 4, 5, 33, 70)}
    heard = drain(engine, [full(name, prompt, max_tokens=6) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(model, prompt, heard[name])


def test_a_prefix_hit_agrees(written: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = written
    engine = load_engine(directory)
    prompt = random_prompt(64, seed=3)
    first = one(engine, full("a", prompt, max_tokens=4))
    again = one(engine, full("b", prompt, max_tokens=4))
    longer = one(engine, full("c", prompt + random_prompt(21, seed=4), max_tokens=4))
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 48, 64)
    assert_agrees(model, prompt, again)
    assert_agrees(model, prompt + random_prompt(21, seed=4), longer)


def test_preempted_sequences_agree(written: tuple[Path, LlamaForCausalLM]) -> None:
    directory, model = written
    engine = load_engine(directory, kv_tokens=144, max_num_batched_tokens=40)
    prompts = {str(n): random_prompt(n, seed=n) for n in (30, 31, 32)}
    heard = drain(engine, [full(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    assert engine.scheduler.num_preemptions > 0
    for name, prompt in prompts.items():
        assert len(heard[name].token_ids) == 30
        assert_agrees(model, prompt, heard[name])


def test_bf16_follows_the_reference_in_bf16(tmp_path: Path) -> None:
    model = write_llama(tmp_path, dtype=torch.bfloat16)
    engine = load_engine(tmp_path, dtype="bfloat16")
    assert engine.info.dtype == "bfloat16"
    prompt = random_prompt(40, seed=5)
    heard = one(engine, full("a", prompt, max_tokens=1))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert (as_distribution(heard.logprobs[0]) - expected).abs().max() <= 0.1


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    model = write_llama(tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    prompt = random_prompt(12, seed=6)
    assert_agrees(model, prompt, one(load_engine(tmp_path), full("a", prompt, max_tokens=3)))


def test_a_small_bf16_checkpoint_is_computed_in_fp32_on_a_cpu(tmp_path: Path) -> None:
    model = write_llama(tmp_path, dtype=torch.bfloat16)
    engine: Engine = load_engine(tmp_path)
    assert engine.info.dtype == "float32"
    prompt = random_prompt(30, seed=7)
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert next(model.parameters()).dtype == torch.bfloat16
    assert_agrees(exact, prompt, one(engine, full("a", prompt, max_tokens=3)))

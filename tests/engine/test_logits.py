"""The form of a checkpoint changes no distribution: bf16, shards, and fp32 on a CPU."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from pilotlight.engine.core.engine import Engine
from tests.checkpoints import write_llama
from tests.engine.agreement import as_distribution, assert_agrees, full
from tests.engine.driver import load_engine, one, random_prompt

pytestmark = pytest.mark.usefixtures("arithmetic")


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


@pytest.mark.cpu_only
def test_a_small_bf16_checkpoint_is_computed_in_fp32_on_a_cpu(tmp_path: Path) -> None:
    model = write_llama(tmp_path, dtype=torch.bfloat16)
    engine: Engine = load_engine(tmp_path)
    assert engine.info.dtype == "float32"
    prompt = random_prompt(30, seed=7)
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert next(model.parameters()).dtype == torch.bfloat16
    assert_agrees(exact, prompt, one(engine, full("a", prompt, max_tokens=3)))


@pytest.mark.cpu_only
def test_a_float16_checkpoint_says_how_it_is_stored_and_computed(tmp_path: Path) -> None:
    model = write_llama(tmp_path, dtype=torch.float16)
    prompt = random_prompt(30, seed=8)
    exact = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert next(model.parameters()).dtype == torch.float16
    engine = load_engine(tmp_path)
    assert (engine.info.dtype, engine.info.stored_dtypes) == ("float32", ("F16",))
    assert_agrees(exact, prompt, one(engine, full("a", prompt, max_tokens=3)))
    assert load_engine(tmp_path, dtype="bfloat16").info.stored_dtypes == ("F16",)

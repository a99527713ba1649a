"""Every model family, compared with `transformers` along every path of a token through the scheduler and the cache."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.cpu_kernels import BOTH
from tests.engine.agreement import as_distribution, assert_agrees, full
from tests.engine.driver import drain, drain_preempting, load_engine, one, random_prompt
from tests.engine.families import FURTHER, MODELS, SWEPT, write_family
from tests.in_turn import in_turn, swept

pytestmark = pytest.mark.usefixtures("arithmetic")
PATHS = swept(BOTH, FURTHER)


@pytest.fixture(scope="module", params=[*MODELS, *SWEPT])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("family")
    return directory, write_family(directory, request.param)


def test_a_whole_prompt_and_its_continuation_agree(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    prompt = random_prompt(77, seed=1)
    heard = one(load_engine(directory, dtype="float32"), full("a", prompt, max_tokens=9, prompt_logprobs=True))
    assert len(heard.logprobs) == 9
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 76
    assert_agrees(model, prompt, heard)


# For each arithmetic and family, one chunk size below the block size and one above; the other two sizes are slow tests.
CHUNKED = [
    pytest.param(arithmetic, written, budget, marks=[] if (i + j) % 2 == k % 2 and k // 2 == i else pytest.mark.slow)
    for i, arithmetic in enumerate(BOTH)
    for j, written in enumerate(MODELS)
    for k, budget in enumerate((1, 7, 16, 50))
]
CHUNKED += [pytest.param(*each.values, budget, marks=pytest.mark.slow) for each in PATHS for budget in (1, 7, 16, 50)]


@pytest.mark.parametrize(("arithmetic", "written", "budget"), CHUNKED, indirect=["arithmetic", "written"])
def test_a_chunked_prompt_agrees(written: tuple[Path, PreTrainedModel], budget: int) -> None:
    directory, model = written
    engine = load_engine(directory, dtype="float32", max_num_batched_tokens=budget)
    prompt = random_prompt(61, seed=2)
    heard = one(engine, full("a", prompt, max_tokens=4, prompt_logprobs=True))
    assert heard.prompt_logprobs is not None
    assert len(heard.prompt_logprobs) == 60
    assert_agrees(model, prompt, heard)


@pytest.mark.parametrize(("arithmetic", "written"), in_turn(BOTH, MODELS) + PATHS, indirect=True)
def test_sequences_in_one_batch_agree_each_for_itself(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory, dtype="float32", max_num_batched_tokens=64, block_size=5)
    prompts = {str(n): random_prompt(n, seed=n) for n in (1, 4, 5, 33, 70)}
    heard = drain(engine, [full(name, prompt, max_tokens=6) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert_agrees(model, prompt, heard[name])


@pytest.mark.parametrize(("arithmetic", "written"), in_turn(BOTH, MODELS) + PATHS, indirect=True)
def test_a_prefix_hit_agrees(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory, dtype="float32")
    prompt = random_prompt(64, seed=3)
    first = one(engine, full("a", prompt, max_tokens=4))
    again = one(engine, full("b", prompt, max_tokens=4))
    longer = one(engine, full("c", prompt + random_prompt(21, seed=4), max_tokens=4))
    assert (first.num_cached_tokens, again.num_cached_tokens, longer.num_cached_tokens) == (0, 48, 64)
    assert_agrees(model, prompt, again)
    assert_agrees(model, prompt + random_prompt(21, seed=4), longer)


@pytest.mark.long
@pytest.mark.parametrize(("arithmetic", "written"), in_turn(BOTH, MODELS) + PATHS, indirect=True)
def test_preempted_sequences_agree(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    engine = load_engine(directory, dtype="float32", kv_tokens=144, max_num_batched_tokens=40)
    prompts = {str(n): random_prompt(n, seed=n) for n in (30, 31, 32)}
    heard = drain_preempting(engine, [full(name, prompt, max_tokens=30) for name, prompt in prompts.items()])
    assert engine.scheduler.counts.preemptions > 0
    for name, prompt in prompts.items():
        assert len(heard[name].token_ids) == 30
        assert_agrees(model, prompt, heard[name])


@pytest.mark.parametrize(
    ("arithmetic", "written"),
    [pytest.param(BOTH[i % 2], name) for i, name in enumerate(FURTHER)],
    indirect=True,
)
def test_a_further_family_agrees_in_chunks_in_a_batch_and_after_a_prefix(
    written: tuple[Path, PreTrainedModel],
) -> None:
    """This runs every part of a layer once; the slow sweeps test each path separately."""
    directory, model = written
    engine = load_engine(directory, dtype="float32", max_num_batched_tokens=24)
    prompts = {"a": random_prompt(61, seed=2), "b": random_prompt(5, seed=5)}
    heard = drain(engine, [full(name, prompt, max_tokens=4) for name, prompt in prompts.items()])
    again = one(engine, full("again", prompts["a"], max_tokens=2))
    assert again.num_cached_tokens == 48
    for name, prompt in prompts.items():
        assert_agrees(model, prompt, heard[name])
    assert_agrees(model, prompts["a"], again)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3, one kv head, untied",
        "gemma4, three of five experts beside a dense part, keys are values",
        "qwen3, yarn, tied",
        "gpt-oss, experts in mxfp4",
        "qwen3.5, attention in layer 2",
        "granite-4, attention in layer 1",
    ],
)
def test_bf16_follows_the_reference_in_bf16(tmp_path: Path, name: str) -> None:
    model = write_family(tmp_path, name, torch.bfloat16)
    prompt = random_prompt(40, seed=5)
    heard = one(load_engine(tmp_path, dtype="bfloat16"), full("a", prompt, max_tokens=1))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    assert (as_distribution(heard.logprobs[0]) - expected).abs().mean() <= 0.05

"""Penalties and biases in the engine: they match their definitions, and keep invariants I8 and I9."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pilotlight.engine.api.protocol import Submit
from tests.checkpoints import write_llama
from tests.engine.driver import drain, load_engine, one, random_prompt, submit

PENALTIES: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 11, "repetition_penalty": 0.8, "frequency_penalty": 1.1},
    {"temperature": 0.9, "seed": 5, "top_k": 40, "logit_bias": ((7, 4.0), (8, -100.0)), "presence_penalty": 2.0},
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
]
NUM_TOKENS = 25


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, write_llama(directory)


def requests() -> list[Submit]:
    return [
        submit(f"{n}-{i}", random_prompt(n, seed=n), max_tokens=NUM_TOKENS, **sampling)
        for n in (3, 32, 50)
        for i, sampling in enumerate(PENALTIES)
    ]


@pytest.fixture(scope="module")
def alone(written: tuple[Path, PreTrainedModel]) -> dict[str, list[int]]:
    """Return the tokens of each request alone, on a new engine."""
    return {r.sequence_id: one(load_engine(written[0]), r).token_ids for r in requests()}


def greedy_by_definition(model: PreTrainedModel, prompt: list[int], sampling: dict[str, Any]) -> list[int]:
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0, -1].tolist()
        for token, bias in sampling.get("logit_bias", ()):
            logits[token] += bias
        for token in set(prompt + output):
            penalty = sampling.get("repetition_penalty", 1.0)
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        for token in set(output):
            logits[token] -= sampling.get("frequency_penalty", 0.0) * output.count(token)
            logits[token] -= sampling.get("presence_penalty", 0.0)
        output.append(max(range(len(logits)), key=logits.__getitem__))
    return output


@pytest.mark.parametrize(
    "sampling",
    [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": ((9, 3.0), (17, 3.5)), "frequency_penalty": 2.0, "repetition_penalty": 1.1},
    ],
)
def test_greedy_tokens_are_those_of_the_definition(
    written: tuple[Path, PreTrainedModel], sampling: dict[str, Any]
) -> None:
    directory, model = written
    prompt = random_prompt(12, seed=4)
    heard = one(load_engine(directory), submit("a", prompt, max_tokens=NUM_TOKENS, **sampling))
    assert heard.token_ids == greedy_by_definition(model, prompt, sampling)
    plain = one(load_engine(directory), submit("b", prompt, max_tokens=NUM_TOKENS))
    assert heard.token_ids != plain.token_ids


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 13},
        {"block_size": 5, "max_num_seqs": 4},
        {"kv_tokens": 160, "max_num_batched_tokens": 50},
    ],
    ids=["one batch", "small chunks", "small blocks, few at a time", "preempted"],
)
def test_company_and_chunks_and_preemption_change_no_token(
    written: tuple[Path, PreTrainedModel], alone: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    engine = load_engine(written[0], **({"kv_tokens": 2048} | limits))
    heard = drain(engine, requests())
    assert {name: h.token_ids for name, h in heard.items()} == alone
    assert ("kv_tokens" in limits) == (engine.scheduler.counts.preemptions > 0)


@pytest.mark.parametrize("cut", [1, 10, 24])
def test_a_continuation_counts_delivered_tokens_as_output(
    written: tuple[Path, PreTrainedModel], alone: dict[str, list[int]], cut: int
) -> None:
    engine = load_engine(written[0])
    for request in requests():
        delivered = alone[request.sequence_id][:cut]
        prompt = [*request.prompt_token_ids, *delivered]
        sampling = PENALTIES[int(request.sequence_id.rpartition("-")[2])]
        rest = submit("rest", prompt, num_delivered_tokens=cut, max_tokens=NUM_TOKENS - cut, **sampling)
        assert delivered + one(engine, rest).token_ids == alone[request.sequence_id]


def test_a_continuation_taken_for_a_prompt_would_differ(
    written: tuple[Path, PreTrainedModel], alone: dict[str, list[int]]
) -> None:
    """The previous test relies on this difference."""
    engine = load_engine(written[0])
    delivered = alone["3-1"][:10]
    wrong = submit("rest", random_prompt(3, seed=3) + delivered, max_tokens=NUM_TOKENS - 10, **PENALTIES[1])
    assert delivered + one(engine, wrong).token_ids != alone["3-1"]


def test_logprobs_are_the_models_own(written: tuple[Path, PreTrainedModel]) -> None:
    directory, model = written
    prompt = random_prompt(9, seed=5)
    asked = {"frequency_penalty": 2.0, "repetition_penalty": 1.5, "logit_bias": ((40, 5.0),), "num_logprobs": 1}
    heard = one(load_engine(directory), submit("a", prompt, max_tokens=12, **asked))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt + heard.token_ids])).logits[0].log_softmax(-1)
    for i, reported in enumerate(heard.logprobs):
        assert abs(reported.logprob - expected[len(prompt) + i - 1, heard.token_ids[i]]) <= 1e-4
        assert abs(reported.top[0][1] - expected[len(prompt) + i - 1].max()) <= 1e-4


def test_a_bias_can_forbid_and_force(written: tuple[Path, PreTrainedModel]) -> None:
    engine = load_engine(written[0])
    prompt = random_prompt(9, seed=6)
    forced = one(engine, submit("a", prompt, max_tokens=5, temperature=1.0, logit_bias=((123, 100.0),)))
    assert forced.token_ids == [123] * 5
    best = one(engine, submit("b", prompt, max_tokens=1)).token_ids[0]
    assert one(engine, submit("c", prompt, max_tokens=1, logit_bias=((best, -100.0),))).token_ids != [best]

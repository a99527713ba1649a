"""Invariants I3, I4, I8 and I9: tokens depend on the request alone, not on batches, chunks, caches, preemption or resumption."""

from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.protocol import Submit
from tests.engine.driver import drain, load_engine, one, random_prompt, submit

pytestmark = pytest.mark.usefixtures("arithmetic")

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 2**64 - 1},
]


def requests() -> list[Submit]:
    return [
        submit(f"{n}-{i}", random_prompt(n, seed=n), max_tokens=25, **sampling)
        for n in (3, 32, 50)
        for i, sampling in enumerate(SAMPLING)
    ]


@pytest.fixture(scope="module")
def alone(checkpoint: Path, arithmetic: str) -> dict[str, list[int]]:
    """Return the tokens of each request alone, on a new engine."""
    return {r.sequence_id: one(load_engine(checkpoint), r).token_ids for r in requests()}


@pytest.mark.long
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 13},
        {"block_size": 5, "max_num_seqs": 4},
        {"kv_tokens": 160, "max_num_batched_tokens": 50},
        {"depth": 2},
        {"depth": 2, "kv_tokens": 160, "max_num_batched_tokens": 50},
    ],
    ids=[
        "one batch",
        "small chunks",
        "small blocks, few at a time",
        "preempted",
        "overlapped",
        "overlapped and preempted",
    ],
)
def test_company_and_chunks_and_preemption_change_no_token(
    checkpoint: Path, alone: dict[str, list[int]], limits: dict[str, Any]
) -> None:
    engine = load_engine(checkpoint, **limits)
    heard = drain(engine, requests())
    assert {name: h.token_ids for name, h in heard.items()} == alone
    assert ("kv_tokens" in limits) == (engine.scheduler.counts.preemptions > 0)


def test_chunks_change_no_log_probability_of_the_prompt(checkpoint: Path) -> None:
    message = submit("a", random_prompt(50, seed=50), max_tokens=1, prompt_logprobs=True)
    whole = one(load_engine(checkpoint), message).prompt_logprobs
    parts = one(load_engine(checkpoint, max_num_batched_tokens=13), message).prompt_logprobs
    assert whole is not None
    assert parts is not None
    assert len(whole) == 49, "all output tokens except the first"
    assert [reported.logprob for reported in parts] == pytest.approx([reported.logprob for reported in whole], abs=1e-4)


@pytest.mark.parametrize("chunk", [512, 13])
def test_log_probabilities_of_a_prompts_end_are_the_same_after_a_cached_prefix(checkpoint: Path, chunk: int) -> None:
    prompt = random_prompt(60, seed=51)
    whole = one(load_engine(checkpoint), submit("a", prompt, max_tokens=1, prompt_logprobs=True)).prompt_logprobs
    engine = load_engine(checkpoint, max_num_batched_tokens=chunk)
    one(engine, submit("b", prompt[:50], max_tokens=1))
    for first in (51, 50, 33, 32, 1):
        heard = one(engine, submit(f"c{first}", prompt, max_tokens=1, prompt_logprobs=True, prompt_logprobs_from=first))
        assert whole is not None
        assert heard.prompt_logprobs is not None
        assert [each.logprob for each in heard.prompt_logprobs] == pytest.approx(
            [each.logprob for each in whole[first - 1 :]], abs=1e-4
        )
        assert heard.num_cached_tokens == (first - 1) // 16 * 16, "full blocks before the last token"


def test_a_warm_cache_changes_no_token(checkpoint: Path, alone: dict[str, list[int]]) -> None:
    engine = load_engine(checkpoint)
    drain(engine, requests())
    heard = drain(engine, requests())
    assert sum(h.num_cached_tokens or 0 for h in heard.values()) > 0
    assert {name: h.token_ids for name, h in heard.items()} == alone


@pytest.mark.parametrize("cut", [1, 10, 24])
def test_a_resumed_stream_continues_as_if_never_cut(checkpoint: Path, alone: dict[str, list[int]], cut: int) -> None:
    engine = load_engine(checkpoint)
    for request in requests():
        delivered = alone[request.sequence_id][:cut]
        sampling = {
            name: getattr(request.sampling, name) for name in ("temperature", "seed", "top_k", "top_p", "min_p")
        }
        rest = one(engine, submit("resumed", [*request.prompt_token_ids, *delivered], max_tokens=25 - cut, **sampling))
        assert delivered + rest.token_ids == alone[request.sequence_id]


def test_another_seed_gives_other_tokens(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    prompt = random_prompt(20, seed=9)
    streams = {tuple(one(engine, submit("a", prompt, temperature=1.0, seed=s)).token_ids) for s in range(5)}
    assert len(streams) == 5


def test_tenants_with_different_salts_share_no_blocks(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    prompt = random_prompt(80, seed=10)
    cached = [
        one(engine, submit(name, prompt, salt=salt)).num_cached_tokens
        for name, salt in [("a", b"one"), ("b", b"two"), ("c", b""), ("d", b"one"), ("e", b"two")]
    ]
    assert cached == [0, 0, 0, 64, 64]


def test_a_conversations_second_turn_finds_its_first(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    prompt = random_prompt(40, seed=11)
    answer = one(engine, submit("a", prompt, max_tokens=30)).token_ids
    second = one(engine, submit("b", prompt + answer + random_prompt(9, seed=12)))
    assert second.num_cached_tokens == (40 + 29) // 16 * 16  # of the answer, all but the last token were computed
    load = engine.load()
    assert load.prefix_queries == 40 + 79
    assert load.prefix_hits == 64

"""Tokens chosen with a grammar, penalties and random numbers together."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.step import ChoiceRow
from pilotlight.engine.core.token_counts import TokenCounts
from pilotlight.engine.execution.runner import Forwarded, ModelRunner
from pilotlight.engine.execution.sampling import choose_tokens, prompt_logprobs


def test_log_probabilities_are_the_models_whatever_a_grammar_allows() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    sampling, mask = SamplingParams(1, temperature=0.0, num_logprobs=2), array("i", [1 << 5, 0])  # permits only token 5
    rows = [ChoiceRow(i, 0, sampling, mask=mask if i == 1 else None) for i in range(3)]
    chosen = choose_tokens(logits.clone(), rows).read()
    best = expected.argmax(-1).tolist()
    assert [each.token_id for each in chosen] == [best[0], 5, best[2]]
    for i, each in enumerate(chosen):
        assert each.logprobs is not None
        assert abs(each.logprobs.logprob - float(expected[i, each.token_id])) < 1e-5
        assert [token for token, _ in each.logprobs.top] == expected[i].topk(2).indices.tolist()


def test_rows_that_choose_nothing_shift_no_others() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    best = logits.argmax(-1).tolist()
    rows = [
        ChoiceRow(i, 0, SamplingParams(1, temperature=0.0)) for i in (0, 2)
    ]  # row 1 belongs to a sequence that has ended
    runner = SimpleNamespace(kv_cache=torch.zeros(1), _since=lambda began: 0.0, chosen=None)
    ModelRunner.choose(cast("Any", runner), Forwarded(logits, {}, {}, 0.0), rows)
    assert runner.chosen.tolist() == [best[0], best[2]]


VOCAB = 64
PARAMS = st.builds(
    SamplingParams,
    st.just(1),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([None, 1, 5]),
    top_p=st.sampled_from([1.0, 0.6]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.sampled_from([0, -1, 2**63 + 5, 7]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 3.0]),
    presence_penalty=st.sampled_from([0.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.5]),
    logit_bias=st.sampled_from([(), (), ((3, 8.0), (9, -8.0))]),
    num_logprobs=st.sampled_from([None, 0, 2, 5]),
)


def row(number: int, sampling: SamplingParams, is_masked: bool) -> ChoiceRow:
    counts = None
    if sampling.adjusts_logits:
        counted = TokenCounts(sampling, 6)
        counted.catch_up([(number * 7 + i * i) % VOCAB for i in range(12)], 12)
        counts = counted.entries
    allowed = 1 << (number * 5 % 31) | 1 << 17
    return ChoiceRow(number, 11 + number, sampling, counts, array("i", [allowed, 0]) if is_masked else None)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(PARAMS, st.booleans()), min_size=2, max_size=5), st.integers(0, 3))
def test_a_row_chooses_in_company_what_it_chooses_alone(asked: list[tuple[SamplingParams, bool]], seed: int) -> None:
    logits = 3 * torch.randn(len(asked), VOCAB, generator=torch.Generator().manual_seed(seed))
    rows = [row(number, sampling, is_masked) for number, (sampling, is_masked) in enumerate(asked)]
    together = logits.clone()
    chosen = choose_tokens(together, rows).read()
    if any(sampling.num_logprobs is not None for sampling, _ in asked):
        assert torch.equal(together, logits), "the reported distribution is the model's own"
    for i, (each, given_row) in enumerate(zip(chosen, rows, strict=True)):
        (alone,) = choose_tokens(logits[i : i + 1].clone(), [given_row]).read()
        assert (each.token_id, each.is_finite) == (alone.token_id, True)
        assert given_row.mask is None or given_row.mask[each.token_id // 32] >> each.token_id % 32 & 1
        num_logprobs = given_row.sampling.num_logprobs
        assert (each.logprobs is None) == (alone.logprobs is None) == (num_logprobs is None)
        if each.logprobs is not None:
            expected = logits[i].log_softmax(-1)
            assert each.logprobs.logprob == pytest.approx(float(expected[each.token_id]), abs=1e-5)
            assert len(each.logprobs.top) == num_logprobs
            assert [token for token, _ in each.logprobs.top] == expected.topk(num_logprobs or 0).indices.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_a_finite_highest_logit_is_reported_and_spoils_no_other(bad: float) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    logits[1, 5] = bad
    for temperature in (0.0, 0.01):
        rows = [ChoiceRow(i, 0, SamplingParams(1, temperature=temperature)) for i in range(3)]
        chosen = choose_tokens(logits.clone(), rows).read()
        assert [each.is_finite for each in chosen] == [True, False, True]
        assert [chosen[0].token_id, chosen[2].token_id] == [best[0], best[2]]


def test_log_probabilities_of_a_long_prompt_are_those_of_its_rows() -> None:
    hidden = torch.randn(7, VOCAB, generator=torch.Generator().manual_seed(4))
    token_ids = array("q", [3, 1, 60, 0, 63, 9, 9])
    asked: list[int] = []

    def logits(some: torch.Tensor) -> torch.Tensor:
        asked.append(len(some))
        return 2 * some

    told = prompt_logprobs(logits, hidden, token_ids, 2, size=3).read()
    assert asked == [3, 3, 1]
    expected = (2 * hidden).log_softmax(-1)
    for of, (token_id, each) in zip(expected, zip(token_ids, told, strict=True), strict=True):
        assert each.logprob == pytest.approx(float(of[token_id]), abs=1e-5)
        assert each.rank == 1 + int((of > of[token_id]).sum())
        assert [token for token, _ in each.top] == of.topk(2).indices.tolist()

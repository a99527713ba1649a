"""Tokens that a grammar, penalties and chance choose together."""

from array import array
from types import SimpleNamespace
from typing import Any, cast

import torch

from engine.protocol import SamplingParams
from engine.runner import Forwarded, ModelRunner
from engine.sampling import choose_tokens
from engine.step import ChoiceRow


def test_log_probabilities_are_the_models_whatever_a_grammar_allows() -> None:
    logits = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    expected = logits.log_softmax(-1)
    sampling, mask = SamplingParams(1, temperature=0.0, num_logprobs=2), array("i", [1 << 5, 0])  # the token 5 alone
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
    rows = [ChoiceRow(i, 0, SamplingParams(1, temperature=0.0)) for i in (0, 2)]  # the sequence between them has ended
    runner = SimpleNamespace(kv_cache=torch.zeros(1), _since=lambda began: 0.0, _chosen=None)
    ModelRunner.choose(cast("Any", runner), Forwarded(logits, {}, {}, 0.0), rows)
    assert runner._chosen.tolist() == [best[0], best[2]]

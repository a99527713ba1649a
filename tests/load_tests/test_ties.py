"""Texts that differ after a rounding error: a tie between two tokens is detected, and a wrong token is not a tie."""

import pytest
import torch

from load_tests.ties import TIE, TieJudge, margin_of


def test_a_draw_between_two_shares_is_a_tie_and_one_inside_a_share_is_not() -> None:
    shares = torch.tensor([0.25, 0.25, 0.0, 0.5], dtype=torch.float64).log()
    assert margin_of(shares, 1.0, 0.5 + 1e-9, 1, 3) < TIE
    assert margin_of(shares, 1.0, 0.5 + 1e-9, 3, 1) < TIE
    assert margin_of(shares, 1.0, 0.5 + 1e-9, 0, 3) == pytest.approx(0.25)
    assert margin_of(shares, 1.0, 0.6, 1, 3) == pytest.approx(0.1)
    assert margin_of(shares, 0.5, 0.6, 1, 3) == pytest.approx(0.6 - 1 / 3)


def test_the_likeliest_two_are_a_tie_where_they_are_equal() -> None:
    logprobs = torch.tensor([0.4, 0.4 - 1e-7, 0.2], dtype=torch.float64).log()
    assert margin_of(logprobs, 0.0, None, 0, 1) < TIE
    assert margin_of(logprobs, 0.0, None, 0, 2) == pytest.approx(0.693, abs=1e-3)


def test_the_models_own_choice_is_distinguished_from_another_by_its_distribution() -> None:
    judge, prompt = TieJudge(), tuple(range(40, 80))
    logprobs = judge.logprobs(prompt)
    second, best = logprobs.topk(2).indices.flip(0).tolist()
    gap = (logprobs[best] - logprobs[second]).item()
    assert judge.margin(prompt, [best], [second], {"temperature": 0}) == pytest.approx(gap, abs=TIE)
    assert judge.margin(prompt, [best, 5], [best], {"temperature": 0}) == float("inf")
    other = (best + 1) % len(logprobs)
    assert judge.margin(prompt, [best], [other], {"temperature": 0.9, "seed": 3}) > TIE

import torch

from kernels.logprobs import token_logprobs, token_ranks
from tests.closeness import assert_close


def test_logprobs_are_the_log_softmax_of_chosen_and_likeliest() -> None:
    logits = torch.randn(5, 123) * 4
    chosen = torch.tensor([0, 122, 5, 7, 7])
    expected = logits.double().log_softmax(-1)
    actual, top_ids, top = token_logprobs(logits, chosen, 3)
    assert_close("chosen", expected[torch.arange(5), chosen], actual, 1e-6)
    assert_close("top", expected.sort(descending=True).values[:, :3], top, 1e-6)
    assert top_ids[:, 0].tolist() == logits.argmax(-1).tolist()


def test_no_alternatives_may_be_asked_for() -> None:
    _, top_ids, top = token_logprobs(torch.randn(2, 5), torch.tensor([1, 2]), 0)
    assert top_ids.shape == top.shape == (2, 0)


def test_a_rank_counts_the_likelier_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    assert token_ranks(logits, torch.tensor([2, 0])).tolist() == [3, 1]

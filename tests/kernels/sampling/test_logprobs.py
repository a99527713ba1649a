import torch

from pilotlight.kernels.sampling.logprobs import token_logprobs, token_ranks


def test_no_alternatives_may_be_asked_for() -> None:
    _, top_ids, top = token_logprobs(torch.randn(2, 5), torch.tensor([1, 2]), 0)
    assert top_ids.shape == top.shape == (2, 0)


def test_a_rank_counts_the_likelier_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
    assert token_ranks(logits, torch.tensor([2, 0])).tolist() == [3, 1]

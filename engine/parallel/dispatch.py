"""Sends tokens to the ranks that have their experts, and returns the results.

Used if every rank has its own tokens, and some of a layer's experts. A token goes once to each rank that has one of its experts, with the ids and
weights of these experts. That rank sums its experts' results; the sums return and are added in the order of the ranks. There is no capacity limit, so
no token is dropped. There are three exchanges: counts, tokens, sums. This module knows tensors and ranks, and is independent of how experts compute.
"""

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from pilotlight.engine.parallel.communicator import Communicator


class RoutedTokens(NamedTuple):
    """Tokens, and the experts of one rank that each of them uses."""

    x: torch.Tensor  # [tokens, hidden]
    weights: torch.Tensor  # [tokens, top_k] fp32
    expert_ids: torch.Tensor  # [tokens, top_k] int64; -1 for an expert of another rank

    @classmethod
    def unpacked(cls, rows: torch.Tensor, hidden: int, dtype: torch.dtype) -> "RoutedTokens":
        """Return the tokens that `packed` has encoded."""
        of_x = hidden * dtype.itemsize
        of_each = (rows.shape[1] - of_x) // 2
        x, weights, ids = (part.contiguous() for part in torch.split(rows, [of_x, of_each, of_each], dim=1))
        return cls(x.view(dtype), weights.view(torch.float32), ids.view(torch.int32).long())

    def packed(self) -> torch.Tensor:
        """Return a row of bytes for each token, [tokens, bytes] uint8, so that one message carries everything."""
        # With an explicit format, because a view as bytes needs a last stride of 1, but an empty tensor counts as contiguous with any strides.
        ids = self.expert_ids.to(torch.int32, memory_format=torch.contiguous_format)
        parts = (self.x.contiguous(), self.weights.contiguous(), ids)
        return torch.cat([part.view(torch.uint8) for part in parts], dim=1)


class RankExperts(Protocol):
    """A layer's experts on this rank, and the ranks that have the other experts."""

    def count(self, expert_ids: torch.Tensor) -> None:
        """Count the tokens of each expert."""

    def ranks_of(self, expert_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the rank that computes each pair, [tokens, top_k]."""

    def own_sum(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of this rank's experts for x, [tokens, hidden]; expert -1 is not computed."""


def dispatch(
    experts: RankExperts, tokens: RoutedTokens, positions: torch.Tensor, ranks: "Communicator"
) -> torch.Tensor:
    """Return, for each of this rank's tokens, the weighted sum of its experts, [tokens, hidden].

    Also computes this rank's experts for other ranks' tokens. All ranks of the stage call it at the same time, even without tokens. Ranks that share
    matrices have the same tokens: each rank handles a part of them and returns zeros for the others; the caller sums the results over these ranks.
    """
    (num_all, hidden), first, every = tokens.x.shape, ranks.shard.rank, ranks.shard.size
    x, weights, expert_ids = (part[first::every] for part in tokens)
    positions = positions[first::every]
    experts.count(expert_ids)
    owners = experts.ranks_of(expert_ids, positions)
    goes_to = torch.stack([(owners == rank).any(1) for rank in range(ranks.size)])
    rank_of, token_of = goes_to.nonzero(as_tuple=True)
    sent, received = ranks.exchange_counts(goes_to.sum(1))
    ids = torch.where(owners[token_of] == rank_of.unsqueeze(1), expert_ids[token_of], -1)
    leaving = RoutedTokens(x[token_of], weights[token_of], ids).packed()
    arrived = RoutedTokens.unpacked(ranks.exchange(leaving, sent, received), hidden, x.dtype)
    sums = ranks.exchange(experts.own_sum(*arrived), received, sent)
    total = torch.zeros(num_all, hidden, dtype=torch.float32, device=x.device)
    for places, of_rank in zip(torch.split(token_of, sent), torch.split(sums, sent), strict=True):
        # Each rank returns at most one sum for a token, so a token's sums are added in the order of the ranks.
        total.index_add_(0, first + every * places, of_rank.float())
    return total.to(x.dtype)

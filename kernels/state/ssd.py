"""The state space of Mamba-2 (Dao and Gu, arXiv 2405.21060): each head keeps a matrix that fades, and to which every token adds.

With S a state [state, value], of a token its input x [value] (times its step), b and c [state] of its group of heads, and log of its decay g <= 0:

    S <- exp(g) S + b x^T;    y = S^T c

A prompt is computed in chunks (section 6 there), so that all but the step from chunk to chunk are matrix products. Everything is fp32.
"""

import torch

_CHUNK = 64  # tokens: the products within a chunk grow with its square, the number of steps between chunks falls


def ssd(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence's tokens: x [tokens, heads, value]; b, c [tokens, groups, state]; g [tokens, heads];
    state [heads, state, value]; all fp32. Return y [tokens, heads, value] and the state behind the last token."""
    tokens, heads, groups = x.shape[0], x.shape[1], b.shape[1]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    # [groups, heads of one, chunks, tokens of a chunk, numbers]; a padded token has g = 0 and x = 0, and changes nothing
    x, b, c, g = (_in_chunks(one, groups, size, padding) for one in (x, b, c, g.unsqueeze(2)))
    sums = g.squeeze(4).cumsum(3)
    lower = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    decays = (sums.unsqueeze(4) - sums.unsqueeze(3)).masked_fill(~lower, -torch.inf).exp()
    outputs = ((c @ b.transpose(3, 4)) * decays) @ x
    reading, writing = c * sums.exp().unsqueeze(4), b * (sums[..., -1:] - sums).exp().unsqueeze(4)
    added, kept = writing.transpose(3, 4) @ x, sums[..., -1].exp()[..., None, None]
    state = torch.unflatten(state, 0, (groups, heads // groups))
    for i in range(x.shape[2]):
        outputs[:, :, i] += reading[:, :, i] @ state
        state = state * kept[:, :, i] + added[:, :, i]
    return outputs.flatten(2, 3).flatten(0, 1)[:, :tokens].transpose(0, 1), state.flatten(0, 1)


def ssd_step(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of each sequence, in the place of tokens above; state [sequences, heads, state, value]. Return y [sequences, heads, value]
    and the states behind the tokens."""
    of_group = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(of_group, 1) for one in (b, c))
    state = state * g.exp()[..., None, None] + b.unsqueeze(3) * x.unsqueeze(2)
    return (c.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(x: torch.Tensor, groups: int, size: int, padding: int) -> torch.Tensor:
    """x [tokens, heads or groups, numbers] -> [groups, heads of one, chunks, size, numbers]"""
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(torch.unflatten(padded, 1, (-1, size)), 0, (groups, -1))

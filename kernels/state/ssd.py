"""The state space of Mamba-2 (Dao and Gu, arXiv 2405.21060).

Each head keeps a matrix that decays, and to which each token adds. With the state S [state, value], and a token's input x [value] (multiplied by its
step size), b [state] and c [state], which the heads of a group share, and log of the decay g <= 0:

    S <- exp(g) S + b x^T;    y = S^T c

A prompt is computed in chunks (section 6 of the paper). Only the recurrence from chunk to chunk is sequential; the rest is matrix products.
All numbers are fp32.
"""

import torch

_CHUNK = 64  # tokens: work within a chunk grows with the square of this, the number of sequential steps falls


def ssd(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process the tokens of one sequence; return outputs and the state after the last.

    x [tokens, heads, value]; b, c [tokens, groups, state]; g [tokens, heads]; state [heads, state, value]; outputs [tokens, heads, value]; all fp32.
    """
    tokens, heads, groups = x.shape[0], x.shape[1], b.shape[1]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    # [groups, heads of a group, chunks, tokens of a chunk, numbers]; a padding token has g = 0 and x = 0, so it does not change the state
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
    """Process one token of each sequence; return outputs and the new states.

    x [sequences, heads, value]; b, c [sequences, groups, state]; g [sequences, heads]; state [sequences, heads, state, value];
    outputs [sequences, heads, value]; all fp32.
    """
    of_group = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(of_group, 1) for one in (b, c))
    state = state * g.exp()[..., None, None] + b.unsqueeze(3) * x.unsqueeze(2)
    return (c.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(x: torch.Tensor, groups: int, size: int, padding: int) -> torch.Tensor:
    """Pad x, and split it into groups of heads, and chunks of tokens.

    x [tokens, heads or groups, numbers] -> [groups, heads of a group, chunks, size, numbers]
    """
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(torch.unflatten(padded, 1, (-1, size)), 0, (groups, -1))

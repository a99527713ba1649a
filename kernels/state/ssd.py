"""The state space of Mamba-2 (Dao and Gu, arXiv 2405.21060).

Each head keeps a matrix that decays, and to which each token adds. With the state S [state, value], and a token's input x [value], step size d, b
[state] and c [state], which the heads of a group share:

    S <- exp(g) S + b (d x)^T;    y = S^T c + skip x
    d = softplus(step + step_bias);    g = -exp(decay_log) d

In torch a prompt is computed in chunks (section 6 of the paper): only the recurrence from chunk to chunk is sequential, the rest is matrix products.
C computes token by token, with the state in a core's cache; a token's result has the same bits in any chunk. All numbers are fp32.
"""

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import state_ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.state.state_batch import StateBatch

# Tokens per chunk. Larger chunks need fewer sequential steps, but the work within a chunk grows with the square of its tokens.
_CHUNK = 64


def _check(
    check: ArgumentCheck,
    xbc: torch.Tensor,
    steps: torch.Tensor,
    decay_logs: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    groups: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> None:
    wide = (torch.float32,)
    check.tensor("states", states, "blocks heads state value", wide, dense=3)
    heads, state, value = (check.size(word) for word in ("heads", "state", "value"))
    check.require(
        "groups", groups > 0 and heads % groups == 0, f"is {groups}, and {heads} heads are not a multiple of it"
    )
    check.derive("heads*value+2*groups*state", heads * value + 2 * groups * state, "states")
    check.tensor("xbc", xbc, "tokens heads*value+2*groups*state", dense=1)
    check.tensor("steps", steps, "tokens heads", (xbc.dtype,), dense=1)
    for name, x in (("decay_logs", decay_logs), ("step_bias", step_bias), ("skip", skip)):
        check.tensor(name, x, "heads", wide, dense=1)
    batch.require(check, xbc.shape[0], states.shape[0])


@operation(_check, triton="state.ssd", native=state_ops.ssd)
def ssd(
    xbc: torch.Tensor,
    steps: torch.Tensor,
    decay_logs: torch.Tensor,
    step_bias: torch.Tensor,
    skip: torch.Tensor,
    groups: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Process the tokens of the batch, and update the states in place; return [tokens, heads, value].

    xbc [tokens, heads * value + 2 * groups * state]: inputs of all heads, then b and c of all groups; steps [tokens, heads]; decay_logs, step_bias,
    skip [heads] fp32; states [blocks, heads, state, value] fp32.
    """
    _, heads, size, value = states.shape
    x, b, c = torch.split(xbc.to(states.dtype), [heads * value, groups * size, groups * size], dim=1)
    x = torch.unflatten(x, 1, (heads, value))
    b, c = (torch.unflatten(one, 1, (groups, size)) for one in (b, c))
    widths = F.softplus(steps.to(states.dtype) + step_bias)
    added, g = x * widths.unsqueeze(2), -decay_logs.exp() * widths
    output = batch.compute(
        states,
        lambda tokens, state: _one_token(added[tokens], b[tokens], c[tokens], g[tokens], state),
        lambda tokens, state: _in_chunks(added[tokens], b[tokens], c[tokens], g[tokens], state),
    )
    return (output + x * skip.unsqueeze(1)).to(xbc.dtype)


def _one_token(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process one token of each sequence; `state` [sequences, heads, state, value]."""
    of_group = x.shape[1] // b.shape[1]
    b, c = (one.repeat_interleave(of_group, 1) for one in (b, c))
    state = state * g.exp()[..., None, None] + b.unsqueeze(3) * x.unsqueeze(2)
    return (c.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(
    x: torch.Tensor, b: torch.Tensor, c: torch.Tensor, g: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Process tokens of one sequence.

    x [tokens, heads, value], b and c [tokens, groups, state], `state` [heads, state, value].
    """
    tokens, heads, groups = x.shape[0], x.shape[1], b.shape[1]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    # [groups, heads of a group, chunks, tokens of a chunk, numbers]; a padding token has g = 0 and x = 0, so it does not change the state
    x, b, c, g = (_chunked(one, groups, size, padding) for one in (x, b, c, g.unsqueeze(2)))
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


def _chunked(x: torch.Tensor, groups: int, size: int, padding: int) -> torch.Tensor:
    """Pad x, and split it into groups of heads, and chunks of tokens.

    x [tokens, heads or groups, numbers] -> [groups, heads of a group, chunks, size, numbers]
    """
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(torch.unflatten(padded, 1, (-1, size)), 0, (groups, -1))

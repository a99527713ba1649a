"""The gated delta rule (Yang et al., arXiv 2412.06464), and Kimi Linear's (arXiv 2510.26692).

Each head keeps a matrix that decays, and that each token corrects along its key. With the state S [key, value], and a token's query q [key] and key
k [key] of length 1, q divided by the root of `key` as well, value v [value], log of the decay g <= 0 and step size b:

    S <- exp(g) S;    S <- S + k (b (v - S^T k))^T;    o = S^T q
    g = -exp(decay_log) softplus(decay + decay_bias);    b = sigmoid(step)

In Kimi Linear's rule each row of S has its own decay: decay, decay_bias and g have one number for each number of the key.

In torch a prompt is computed in chunks. With G the cumulative sums of g within a chunk, and S the state before it, the corrections u of its tokens
solve a triangular system (section 3.3 of the paper):

    u[i] + b[i] sum over j < i of exp(G[i] - G[j]) (k[i] . k[j]) u[j] = b[i] (v[i] - exp(G[i]) S^T k[i])

With a decay for each row of S, exp(G[i] - G[j]) is a factor within the sum of k[i] . k[j].

Only the recurrence from chunk to chunk is sequential; the rest is matrix products and one triangular solve. C computes token by token: since the
state stays in a core's cache, this takes fewer products, and a token's result has the same bits in any chunk. All numbers are fp32.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.kernels.checks import ArgumentCheck
from pilotlight.kernels.cpu import state_ops
from pilotlight.kernels.dispatch import operation
from pilotlight.kernels.state.state_batch import StateBatch

EPS = 1e-6  # added to the squared lengths of queries and keys
# Tokens per chunk. Larger chunks need fewer sequential steps, but the work within a chunk grows with the square of its tokens.
_CHUNK = 64
_CHUNK_OF_ROWS = 16  # with a decay for each row of a state, a chunk needs memory for each row and pair of tokens


class _Inputs(NamedTuple):
    """Inputs of the rule, all fp32."""

    q: torch.Tensor  # [tokens, value_heads, key]
    k: torch.Tensor
    v: torch.Tensor  # [tokens, value_heads, value]
    g: torch.Tensor  # [tokens, value_heads, 1 or key]: logs of decays
    b: torch.Tensor  # [tokens, value_heads]: step sizes

    def of(self, tokens: slice) -> "_Inputs":
        return _Inputs(*[x[tokens] for x in self])


def _check(
    check: ArgumentCheck,
    qkv: torch.Tensor,
    steps: torch.Tensor,
    decays: torch.Tensor,
    decay_logs: torch.Tensor,
    decay_bias: torch.Tensor,
    key_heads: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> None:
    wide = (torch.float32,)
    check.tensor("states", states, "blocks value_heads key value", wide, dense=3)
    heads, key, value = (check.size(word) for word in ("value_heads", "key", "value"))
    check.require(
        "key_heads",
        key_heads > 0 and heads % key_heads == 0,
        f"is {key_heads}, and {heads} value heads are not a multiple of it",
    )
    check.derive("2*key_heads*key+value_heads*value", 2 * key_heads * key + heads * value, "states")
    check.tensor("qkv", qkv, "tokens 2*key_heads*key+value_heads*value", dense=1)
    check.tensor("steps", steps, "tokens value_heads", (qkv.dtype,), dense=1)
    by_row = decays.ndim == 2 and decays.shape[1] != heads
    if by_row:
        check.derive("value_heads*key", heads * key, "states")
    width = "value_heads*key" if by_row else "value_heads"
    check.tensor("decays", decays, f"tokens {width}", (qkv.dtype,), dense=1)
    check.tensor("decay_logs", decay_logs, "value_heads", wide, dense=1)
    check.tensor("decay_bias", decay_bias, width, wide, dense=1)
    batch.require(check, qkv.shape[0], states.shape[0])


@operation(_check, triton="state.delta_rule", native=state_ops.gated_delta_rule)
def gated_delta_rule(
    qkv: torch.Tensor,
    steps: torch.Tensor,
    decays: torch.Tensor,
    decay_logs: torch.Tensor,
    decay_bias: torch.Tensor,
    key_heads: int,
    states: torch.Tensor,
    batch: StateBatch,
) -> torch.Tensor:
    """Apply the rule to a batch, and update states in place; return [tokens, value_heads, value].

    qkv [tokens, 2 * key_heads * key + value_heads * value]: queries and keys of key_heads heads, which value_heads / key_heads heads of values share,
    then values; steps, decays [tokens, value_heads]; decay_logs, decay_bias [value_heads] fp32; states [blocks, value_heads, key, value] fp32. With a
    decay for each row of a state, decays are [tokens, value_heads * key] and decay_bias [value_heads * key].
    """
    _, heads, key, value = states.shape
    size = key_heads * key
    q, k, v = torch.split(qkv.to(states.dtype), [size, size, heads * value], dim=1)
    q, k = (_unit(torch.unflatten(x, 1, (key_heads, key))) for x in (q, k))
    inputs = _Inputs(
        (q * key**-0.5).repeat_interleave(heads // key_heads, 1),
        k.repeat_interleave(heads // key_heads, 1),
        torch.unflatten(v, 1, (heads, value)),
        -decay_logs.exp().unsqueeze(1)
        * torch.unflatten(F.softplus(decays.to(states.dtype) + decay_bias), 1, (heads, -1)),
        steps.to(states.dtype).sigmoid(),
    )
    output = batch.compute(
        states,
        lambda tokens, state: _one_token(*inputs.of(tokens), state),
        lambda tokens, state: _in_chunks(*inputs.of(tokens), state),
    )
    return output.to(qkv.dtype)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale each head of x [tokens, heads, numbers] to length 1."""
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _one_token(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one token of each sequence; `state` [sequences, heads, key, value]."""
    state = state * g.exp().unsqueeze(3)
    seen = (k.unsqueeze(2) @ state).squeeze(2)
    state = state + k.unsqueeze(3) * ((v - seen) * b.unsqueeze(2)).unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to tokens of one sequence; `state` [heads, key, value]."""
    tokens = q.shape[0]
    size = min(_CHUNK if g.shape[2] == 1 else _CHUNK_OF_ROWS, tokens)
    padding = -tokens % size
    # [heads, chunks, tokens of a chunk, ...]; a padding token has g = 0 and b = 0, so it does not change the state
    q, k, v, g, steps = (_chunked(x, size, padding) for x in (q, k, v, g, b.unsqueeze(2)))
    sums = g.cumsum(2)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decays = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(~lower.unsqueeze(2), -torch.inf).exp()
    system = _products(k, k, decays) * steps  # the solver assumes that the diagonal is 1
    faded = sums.exp()
    both = torch.linalg.solve_triangular(
        system, torch.cat((v, k * faded), dim=3) * steps, upper=False, unitriangular=True
    )
    corrections, of_state = torch.split(both, [v.shape[3], k.shape[3]], dim=3)
    within = _products(q, k, decays)
    reading, writing = q * faded, (k * (sums[:, :, -1:] - sums).exp()).transpose(2, 3)
    kept = sums[:, :, -1].exp().unsqueeze(3)
    outputs = torch.empty_like(v)
    for i in range(q.shape[1]):
        u = corrections[:, i] - of_state[:, i] @ state
        outputs[:, i] = reading[:, i] @ state + within[:, i] @ u
        state = state * kept[:, i] + writing[:, i] @ u
    return outputs.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def _products(x: torch.Tensor, y: torch.Tensor, decays: torch.Tensor) -> torch.Tensor:
    """Multiply each two tokens of a chunk, [heads, chunks, size, size].

    x, y [heads, chunks, size, key]; decays [heads, chunks, size, size, 1 or key], factors of the products or of their summands.
    """
    if decays.shape[4] == 1:
        return (x @ y.transpose(2, 3)) * decays.squeeze(4)
    return torch.einsum("hcik,hcjk,hcijk->hcij", x, y, decays)


def _chunked(x: torch.Tensor, size: int, padding: int) -> torch.Tensor:
    """Pad x [tokens, heads, numbers], and split it into chunks [heads, chunks, size, numbers]."""
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(padded, 1, (-1, size))

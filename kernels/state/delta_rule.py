"""The gated delta rule (Yang et al., arXiv 2412.06464).

Each head keeps a matrix that decays, and that each token corrects along its key. With the state S [key, value], and a token's query q [key],
key k [key], value v [value], log of the decay g <= 0 and step size b:

    S <- exp(g) S;    S <- S + k (b (v - S^T k))^T;    o = S^T q

A prompt is computed in chunks. With G the cumulative sums of g within a chunk, and S the state before it, the corrections u of its tokens solve a
triangular system (section 3.3 of the paper):

    u[i] + b[i] sum over j < i of exp(G[i] - G[j]) (k[i] . k[j]) u[j] = b[i] (v[i] - exp(G[i]) S^T k[i])

Only the recurrence from chunk to chunk is sequential; the rest is matrix products and one triangular solve. All numbers are fp32.
"""

import torch

_CHUNK = 64  # tokens: work within a chunk grows with the square of this, the number of sequential steps falls


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to the tokens of one sequence; return outputs and the state after the last.

    q, k [tokens, heads, key]; v [tokens, heads, value]; g, b [tokens, heads]; state [heads, key, value]; outputs [tokens, heads, value]; all fp32.
    """
    tokens = q.shape[0]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    # [heads, chunks, tokens of a chunk, ...]; a padding token has g = 0 and b = 0, so it does not change the state
    q, k, v = (_in_chunks(x, size, padding) for x in (q, k, v))
    g, b = (_in_chunks(x.unsqueeze(2), size, padding).squeeze(3) for x in (g, b))
    sums = g.cumsum(2)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decays = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(~lower, -torch.inf).exp()
    steps = b.unsqueeze(3)
    system = (k @ k.transpose(2, 3)) * decays * steps  # the solver takes its diagonal as ones
    faded = sums.exp().unsqueeze(3)
    both = torch.linalg.solve_triangular(
        system, torch.cat((v, k * faded), dim=3) * steps, upper=False, unitriangular=True
    )
    corrections, of_state = torch.split(both, [v.shape[3], k.shape[3]], dim=3)
    within = (q @ k.transpose(2, 3)) * decays
    reading, writing = q * faded, (k * (sums[:, :, -1:] - sums).exp().unsqueeze(3)).transpose(2, 3)
    kept = sums[:, :, -1].exp()[..., None, None]
    outputs = torch.empty_like(v)
    for i in range(q.shape[1]):
        u = corrections[:, i] - of_state[:, i] @ state
        outputs[:, i] = reading[:, i] @ state + within[:, i] @ u
        state = state * kept[:, i] + writing[:, i] @ u
    return outputs.flatten(1, 2)[:, :tokens].transpose(0, 1), state


def gated_delta_step(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the rule to one token of each sequence; return outputs and the new states.

    q, k [sequences, heads, key]; v [sequences, heads, value]; g, b [sequences, heads]; state [sequences, heads, key, value];
    outputs [sequences, heads, value]; all fp32.
    """
    state = state * g.exp()[..., None, None]
    seen = (k.unsqueeze(2) @ state).squeeze(2)
    state = state + k.unsqueeze(3) * ((v - seen) * b.unsqueeze(2)).unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(x: torch.Tensor, size: int, padding: int) -> torch.Tensor:
    """Pad x [tokens, heads, numbers], and split it into chunks [heads, chunks, size, numbers]."""
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(padded, 1, (-1, size))

"""The gated delta rule (Yang et al., arXiv 2412.06464): each head keeps a matrix that fades, and that every token corrects along its key.

With S a state [key, value], of a token its query q, key k [key], value v [value], log of its decay g <= 0 and step b:

    S <- exp(g) S;    S <- S + k (b (v - S^T k))^T;    o = S^T q

A prompt is computed in chunks: with G the sums of g within a chunk, the corrections u of its tokens solve a triangular system (section 3.3 there),

    u[i] + b[i] sum over j < i of exp(G[i] - G[j]) (k[i] . k[j]) u[j] = b[i] (v[i] - exp(G[i]) S^T k[i])

so that all but the step from chunk to chunk are matrix products. Everything is fp32.
"""

import torch

_CHUNK = 64  # tokens: the products within a chunk grow with its square, the number of steps between chunks falls


def gated_delta_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, b: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one sequence's tokens: q, k [tokens, heads, key]; v [tokens, heads, value]; g, b [tokens, heads]; state [heads, key, value]; all fp32.
    Return o [tokens, heads, value] and the state behind the last token."""
    tokens = q.shape[0]
    size = min(_CHUNK, tokens)
    padding = -tokens % size
    # [heads, chunks, tokens of a chunk, ...]; a padded token has g = 0 and b = 0, and changes nothing
    q, k, v = (_in_chunks(x, size, padding) for x in (q, k, v))
    g, b = (_in_chunks(x.unsqueeze(2), size, padding).squeeze(3) for x in (g, b))
    sums = g.cumsum(2)
    lower = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
    decays = (sums.unsqueeze(3) - sums.unsqueeze(2)).masked_fill(~lower, -torch.inf).exp()
    steps = b.unsqueeze(3)
    system = (k @ k.transpose(2, 3)) * decays * steps  # of which the diagonal counts as ones
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
    """Compute one token of each sequence: q, k [sequences, heads, key]; v [sequences, heads, value]; g, b [sequences, heads];
    state [sequences, heads, key, value]; all fp32. Return o [sequences, heads, value] and the states behind the tokens."""
    state = state * g.exp()[..., None, None]
    seen = (k.unsqueeze(2) @ state).squeeze(2)
    state = state + k.unsqueeze(3) * ((v - seen) * b.unsqueeze(2)).unsqueeze(2)
    return (q.unsqueeze(2) @ state).squeeze(2), state


def _in_chunks(x: torch.Tensor, size: int, padding: int) -> torch.Tensor:
    """x [tokens, heads, numbers] -> [heads, chunks, size, numbers]"""
    padded = torch.nn.functional.pad(x.transpose(0, 1), (0, 0, 0, padding))
    return torch.unflatten(padded, 1, (-1, size))

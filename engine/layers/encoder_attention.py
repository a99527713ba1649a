"""Bidirectional attention: every token of a text sees all others, or those in a window on both sides.

Nothing is cached.
"""

import torch
import torch.nn.functional as F

from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.attention import Attention
from pilotlight.kernels.elementwise.rotary import rotary

_BLOCK = 512  # queries computed at once within a window, so that the mask does not grow with the text


class EncoderAttention(Attention):
    """A decoder's projections, norms and rotation with attention in both directions.

    `shape.window` counts the token itself and its neighbours on one side.
    """

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend within the texts of x [tokens, hidden], which are concatenated; return [tokens, hidden]."""
        heads, kv_heads, head_dim, scale, window = self.shape[:5]
        tokens = x.shape[0]
        qkv = self.qkv_proj(x, context).view(tokens, heads + 2 * kv_heads, head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        if self.shape.rotary is not None:
            qk = rotary(qk, *context.turns[self.shape.rotary])
        q, k = torch.split(qk, [heads, kv_heads], dim=1)
        attended = attend_texts(q, k, v, text_lengths(context), scale, window)
        return context.summed(self.o_proj(attended.reshape(tokens, heads * head_dim), context))


def text_lengths(context: Context) -> list[int]:
    """Return the number of tokens of each text of the batch; texts are computed whole."""
    texts = context.batch.groups[0].prefill
    assert texts is not None, "an encoder's step has only texts"
    return list(texts.host_q_lens)


def attend_texts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float, window: int | None = None
) -> torch.Tensor:
    """Attend within each of several concatenated texts; return [tokens, heads, head_dim].

    q [tokens, heads, head_dim]; k, v [tokens, kv_heads, head_dim], shared by groups of query heads; `lengths` of the texts. `window`: a token
    attends to tokens at a smaller distance; None for the whole text.
    """
    queries, keys, values = (torch.split(tensor.transpose(0, 1), lengths, dim=1) for tensor in (q, k, v))
    attended = [
        _attend(query, key, value, scale, window) for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(attended, dim=1).transpose(0, 1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attend within one text; return [heads, tokens, head_dim].

    q [heads, tokens, head_dim]; k, v [kv_heads, tokens, head_dim].
    """
    tokens = q.shape[1]
    if window is None or tokens <= window:
        return _attention(q, k, v, scale, None)
    blocks = []
    for start in range(0, tokens, _BLOCK):
        end = min(start + _BLOCK, tokens)
        first, last = max(0, start - window + 1), min(tokens, end + window - 1)
        places = torch.arange(first, last, device=q.device)
        sees = (torch.arange(start, end, device=q.device).unsqueeze(1) - places).abs() < window
        blocks.append(_attention(q[:, start:end], k[:, first:last], v[:, first:last], scale, sees))
    return torch.cat(blocks, dim=1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, sees: torch.Tensor | None
) -> torch.Tensor:
    shares_keys = q.shape[0] != k.shape[0]
    return F.scaled_dot_product_attention(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=sees, scale=scale, enable_gqa=shares_keys
    )[0]

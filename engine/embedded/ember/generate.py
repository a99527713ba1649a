"""Greedy answers from the training network, several prompts at once: the evaluation's generator without an engine."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.embedded.ember.network import Layer, Network, rotate

Generate = Callable[[list[list[int]], int], list[list[int]]]

ROWS = 64  # prompts decoded together; more gain nothing on two cores


def greedy(network: Network, end: int) -> Generate:
    """A function from prompts to answers, each without its end mark."""

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        answers: list[list[int]] = [[] for _ in prompts]
        for start in range(0, len(order), ROWS):
            group = order[start : start + ROWS]
            for index, answer in zip(
                group, _answer(network, [prompts[i] for i in group], max_tokens, end), strict=True
            ):
                answers[index] = answer
        return answers

    return generate


@torch.inference_mode()
def _answer(network: Network, prompts: Sequence[list[int]], max_tokens: int, end: int) -> list[list[int]]:
    longest = max(map(len, prompts))
    device = network.embed_tokens.weight.device
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts], device=device)
    padding = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)  # on the left
    caches: list[list[Tensor]] = [[] for _ in network.layers]
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(prompts)))
    seen = 0
    while open_rows and len(max(answers, key=len)) < max_tokens:
        scores = network.logits(_forward(network, ids, padding, seen, caches))
        seen += ids.shape[1]
        ids = scores.argmax(-1, keepdim=True)
        for row in tuple(open_rows):
            token = int(ids[row])
            if token == end:
                open_rows.remove(row)
            else:
                answers[row].append(token)
    return answers


def _forward(network: Network, ids: Tensor, padding: Tensor, seen: int, caches: list[list[Tensor]]) -> Tensor:
    """The last hidden state of each row [batch, width]; appends to the caches."""
    length = ids.shape[1]
    at = torch.arange(seen, seen + length, device=ids.device)
    positions = (at[None, :] - padding[:, None]).clamp(min=0)  # [batch, length]
    x = network.embed_tokens(ids)
    cos, sin = network.cos[positions][:, None].to(x.dtype), network.sin[positions][:, None].to(x.dtype)
    keys = torch.arange(seen + length, device=ids.device)
    visible = (keys[None, None, :] <= at[None, :, None]) & (keys[None, None, :] >= padding[:, None, None])
    # A padded row sees itself, so that no softmax is empty.
    visible = visible | (keys[None, None, :] == at[None, :, None])
    for layer, cache in zip(network.layers, caches, strict=True):
        assert isinstance(layer, Layer)
        x = _layer(layer, x, cos, sin, visible[:, None], cache)
    last: Tensor = network.norm(x[:, -1])
    return last


def _layer(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor, cache: list[Tensor]) -> Tensor:
    batch, length, _ = x.shape
    attention = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (
        project(h).view(batch, length, -1, attention.shape.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    cache[:] = [torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)] if cache else [k, v]
    group = attention.shape.heads // attention.shape.kv_heads
    k, v = cache[0].repeat_interleave(group, 1), cache[1].repeat_interleave(group, 1)
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    x = x + attention.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
    out: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return out

"""Ember's network for training: the Llama architecture in plain torch.

This module knows shapes and weights, and is independent of text. The parameter names are those of `LlamaForCausalLM` in transformers, so engines for
that family load the checkpoints that `save` writes.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 2048
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    feed_forward: int = 704
    max_positions: int = 4096
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape  # [batch, length, width]
        q = self._heads(self.q_proj(x), batch, length)
        k = self._heads(self.k_proj(x), batch, length)
        v = self._heads(self.v_proj(x), batch, length)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = self.shape.heads // self.shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        mixed = attend(q, k, v)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out

    def _heads(self, x: Tensor, batch: int, length: int) -> Tensor:
        return x.view(batch, length, -1, self.shape.head_dim).transpose(1, 2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention, for short rows on a CPU by plain matrix products.

    For 48 rows of 128 tokens in 4 heads these take 27 ms, forward and backward, and torch's fused attention 87; from about 512 tokens on the fused
    one is faster.
    """
    length = q.shape[2]
    if q.is_cuda or length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)) * q.shape[3] ** -0.5  # [batch, heads, length, length]
    places = torch.arange(length, device=q.device)
    scores = scores.masked_fill(places[None, :] > places[:, None], float("-inf"))
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.feed_forward, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Network(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=shape.norm_eps)
        cos, sin = rope_tables(shape)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._initialise()

    def forward(self, ids: Tensor) -> Tensor:
        """Return the last hidden states [batch, length, width], from which `logits` computes logits."""
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        cos, sin = self.cos[:length].to(x.dtype), self.sin[:length].to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # Layers that write to the residual stream start with smaller weights, so that its variance does not grow with depth.
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 if not writes else 0.02 / (2 * self.shape.layers) ** 0.5)


def rope_tables(shape: Shape) -> tuple[Tensor, Tensor]:
    inverse = shape.rope_theta ** -(torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
    angles = torch.outer(torch.arange(shape.max_positions).float(), inverse)  # [max_positions, head_dim / 2]
    return angles.cos(), angles.sin()


def save(network: Network, folder: Path, eos: int, pad: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in network.named_parameters()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shape = network.shape
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "dtype": "bfloat16",
                "torch_dtype": "bfloat16",
                "vocab_size": shape.vocabulary,
                "hidden_size": shape.width,
                "intermediate_size": shape.feed_forward,
                "num_hidden_layers": shape.layers,
                "num_attention_heads": shape.heads,
                "num_key_value_heads": shape.kv_heads,
                "head_dim": shape.head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": shape.max_positions,
                "rms_norm_eps": shape.norm_eps,
                "rope_theta": shape.rope_theta,
                "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
                "attention_bias": False,
                "mlp_bias": False,
                "tie_word_embeddings": True,
                "bos_token_id": None,
                "eos_token_id": eos,
                "pad_token_id": pad,
            },
            indent=2,
        )
        + "\n",
        encoding="utf-8",
    )
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": False, "eos_token_id": eos, "pad_token_id": pad}, indent=2) + "\n", encoding="utf-8"
    )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Network:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    network = Network(
        Shape(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            feed_forward=config["intermediate_size"],
        )
    )
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in tensors.items()})
    return network.to(dtype)

"""Llama 2 and 3 as a table of parts.

Knows the order of the parts and the names of a Hugging Face checkpoint; the arithmetic is in engine/layers and kernels.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from engine.batch import Batch
from engine.errors import CheckpointError
from engine.layers.attention import Attention, AttentionShape, LayerCache
from engine.layers.embedding import Embedding
from engine.layers.mlp import GatedMLP
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RotaryTable, rotary_rule
from engine.layers.weights import WeightLoader
from engine.weights.config import positive_int


class LlamaConfig(NamedTuple):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float
    rotary: dict[str, Any]
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim)


class LlamaLayer:
    def __init__(self, config: LlamaConfig, loader: WeightLoader, name: str) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self.input_norm = RMSNorm.load(loader, f"{name}.input_layernorm", hidden, eps)
        self.attention = Attention.load(loader, f"{name}.self_attn", hidden, config.attention, config.attention_bias)
        self.post_norm = RMSNorm.load(loader, f"{name}.post_attention_layernorm", hidden, eps)
        self.mlp = GatedMLP.load(loader, f"{name}.mlp", hidden, config.intermediate_size, config.mlp_bias)


class LlamaModel:
    def __init__(self, config: LlamaConfig, loader: WeightLoader, context_length: int) -> None:
        self.embedding = Embedding.load(loader, "model.embed_tokens", config.vocab_size, config.hidden_size)
        self.layers = [LlamaLayer(config, loader, f"model.layers.{i}") for i in range(config.num_layers)]
        self.norm = RMSNorm.load(loader, "model.norm", config.hidden_size, config.norm_eps)
        self.head = self.embedding
        if not config.tied:
            self.head = Embedding.load(loader, "lm_head", config.vocab_size, config.hidden_size)
        self.rotary = RotaryTable(config.rotary, config.head_dim, context_length, loader.device)

    def forward(self, batch: Batch, cache: list[LayerCache]) -> torch.Tensor:
        cos, sin = self.rotary.at(batch.positions)
        residual = self.embedding(batch.token_ids)
        x = self.layers[0].input_norm(residual)
        for i, (layer, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
            if i:
                x, residual = layer.input_norm.add(x, residual)
            x = layer.attention(x, cos, sin, layer_cache, batch)
            x, residual = layer.post_norm.add(x, residual)
            x = layer.mlp(x)
        return self.norm.add(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden)


class LlamaFamily:
    @staticmethod
    def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise CheckpointError(f"config.json asks for activation {activation!r}; Llama models use silu")
        heads, hidden = positive_int(config, "num_attention_heads"), positive_int(config, "hidden_size")
        kv_heads = positive_int(config, "num_key_value_heads", heads)
        head_dim = positive_int(config, "head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise CheckpointError(
                f"config.json has {heads} heads, {kv_heads} key-value heads and head_dim {head_dim}: "
                "heads must be a multiple of key-value heads, and head_dim even"
            )
        return LlamaConfig(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=positive_int(config, "max_position_embeddings"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rotary=rotary_rule(config),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )

    @staticmethod
    def load(config: LlamaConfig, loader: WeightLoader, context_length: int) -> LlamaModel:
        model = LlamaModel(config, loader, context_length)
        # old checkpoints store what config.json says
        loader.reader.skip(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
        if config.tied:
            loader.reader.skip(r"lm_head\.weight")  # a copy of the embedding
        return model

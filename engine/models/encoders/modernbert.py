"""ModernBERT: a bidirectional encoder with pre-norms, rotary positions, and windows in most layers."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.description.families.modernbert_config import ModernBertConfig
from pilotlight.engine.description.shapes import AttentionShape
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.encoder_attention import attend_texts, text_lengths
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.layers.rotary import RotaryTable
from pilotlight.engine.models.encoders.bert import word_table
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.elementwise.rotary import rotary


@dataclass(frozen=True, slots=True)
class ModernBertLayer:
    shape: AttentionShape
    attention_norm: LayerNorm | None  # None in the first layer, after the embedding's own norm
    qkv_proj: Linear
    o_proj: Linear
    feed_forward_norm: LayerNorm
    gate_up_proj: Linear
    down_proj: Linear

    @classmethod
    def load(cls, loader: WeightLoader, name: str, config: ModernBertConfig, layer: int) -> "ModernBertLayer":
        hidden, inner, kind = config.hidden_size, config.intermediate_size, config.layers[layer]
        shape = AttentionShape(
            config.num_heads, config.num_heads, config.head_dim, config.head_dim**-0.5, kind.window, layer, kind.rotary
        )
        return cls(
            shape,
            load_norm(loader, f"{name}.attn_norm", config) if layer else None,
            Linear.load(loader, [f"{name}.attn.Wqkv"], [3 * hidden], hidden, config.attention_bias),
            Linear.load(loader, [f"{name}.attn.Wo"], [hidden], hidden, config.attention_bias),
            load_norm(loader, f"{name}.mlp_norm", config),
            Linear.load(loader, [f"{name}.mlp.Wi"], [2 * inner], hidden, config.mlp_bias),
            Linear.load(loader, [f"{name}.mlp.Wo"], [hidden], inner, config.mlp_bias),
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute the layer for x [tokens, hidden], texts concatenated."""
        x = x + self._attention(x if self.attention_norm is None else self.attention_norm(x), context)
        gate, up = self.gate_up_proj(self.feed_forward_norm(x), context).chunk(2, dim=1)
        return x + self.down_proj(F.gelu(gate) * up, context)

    def _attention(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        heads, shape = self.shape.num_heads, self.shape
        assert shape.rotary is not None
        qkv = self.qkv_proj(x, context).view(len(x), 3 * heads, shape.head_dim)
        q, k = rotary(qkv[:, : 2 * heads], *context.turns[shape.rotary]).chunk(2, dim=1)
        attended = attend_texts(q, k, qkv[:, 2 * heads :], text_lengths(context), shape.scale, shape.window)
        return self.o_proj(attended.reshape(x.shape), context)


class ModernBertClasses(NamedTuple):
    """A head that scores classes from a text's pooled hidden states."""

    dense: Linear
    norm: LayerNorm
    classes: Linear

    @classmethod
    def load(cls, loader: WeightLoader, config: ModernBertConfig) -> "ModernBertClasses":
        hidden = config.hidden_size
        return cls(
            Linear.load(loader, ["head.dense"], [hidden], hidden, config.head_bias),
            load_norm(loader, "head.norm", config),
            Linear.load(loader, ["classifier"], [config.num_classes], hidden, bias=True),
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [texts, classes] for hidden [texts, hidden]."""
        return self.classes.plain(self.norm(F.gelu(self.dense.plain(hidden))))


class ModernBert:
    def __init__(
        self,
        words: torch.Tensor,
        norm: LayerNorm,
        layers: list[ModernBertLayer],
        last_norm: LayerNorm,
        rotary: list[RotaryTable],
        head: ModernBertClasses | None,
    ) -> None:
        self.words = words
        self.norm = norm
        self.layers = layers
        self.last_norm = last_norm
        self.rotary = rotary
        self.head = head

    def forward(self, context: Context) -> torch.Tensor:
        turns = tuple([table.at(context.batch.positions) for table in self.rotary])
        context = replace(context, turns=turns)
        x = self.norm(F.embedding(context.batch.token_ids, self.words))
        for layer in self.layers:
            x = layer(x, context)
        return self.last_norm(x)

    def logits(self, hidden: torch.Tensor, ranks: object = None) -> torch.Tensor:
        """Return fp32 logits [texts, classes] for hidden [texts, hidden]."""
        assert self.head is not None, "the encoder has no classes, and validation refuses requests for tokens"
        return self.head(hidden).float()


def load(config: ModernBertConfig, loader: WeightLoader, context_length: int) -> ModernBert:
    root = "model." if "model.embeddings.norm.weight" in loader else ""
    words = word_table(loader, f"{root}embeddings.tok_embeddings", config.vocab_size, config.hidden_size)
    norm = load_norm(loader, f"{root}embeddings.norm", config)
    layers = [ModernBertLayer.load(loader, f"{root}layers.{i}", config, i) for i in range(config.num_layers)]
    last_norm = load_norm(loader, f"{root}final_norm", config)
    head = ModernBertClasses.load(loader, config) if config.num_classes else None
    loader.skip(r"(head|decoder)\..*")  # the head that predicts masked tokens
    rotary = [RotaryTable(rule, config.head_dim, context_length, loader.device) for rule in config.rotary]
    for table in rotary:
        loader.compute(table.compute)
    return ModernBert(words, norm, layers, last_norm, rotary, head)


def load_norm(loader: WeightLoader, name: str, config: ModernBertConfig) -> LayerNorm:
    return LayerNorm.load(loader, name, config.hidden_size, config.eps, bias=config.norm_bias)

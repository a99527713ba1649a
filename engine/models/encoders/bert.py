"""BERT and RoBERTa: bidirectional encoders for embeddings and for scores of classes.

Every token sees every other, so nothing is cached: the model has no KV layers, and its prompts are never split. Position and token type are looked
up, and norms are LayerNorms after the residual additions. If the checkpoint has classes, two layers with a tanh between them score them.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.description.families.bert_config import BertConfig
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.encoder_attention import attend_texts, text_lengths
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class BertLayer:
    num_heads: int
    qkv_proj: Linear
    o_proj: Linear
    attention_norm: LayerNorm
    up_proj: Linear
    down_proj: Linear
    output_norm: LayerNorm

    @classmethod
    def load(cls, loader: WeightLoader, name: str, config: BertConfig) -> "BertLayer":
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv = [f"{name}.attention.self.{part}" for part in ("query", "key", "value")]
        return cls(
            num_heads=config.num_heads,
            qkv_proj=Linear.load(loader, qkv, [hidden] * 3, hidden, bias=True),
            o_proj=Linear.load(loader, [f"{name}.attention.output.dense"], [hidden], hidden, bias=True),
            attention_norm=LayerNorm.load(loader, f"{name}.attention.output.LayerNorm", hidden, config.eps),
            up_proj=Linear.load(loader, [f"{name}.intermediate.dense"], [inner], hidden, bias=True),
            down_proj=Linear.load(loader, [f"{name}.output.dense"], [hidden], inner, bias=True),
            output_norm=LayerNorm.load(loader, f"{name}.output.LayerNorm", hidden, config.eps),
        )

    def __call__(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        """Compute the layer for x [tokens, hidden], texts concatenated."""
        tokens, hidden = x.shape
        head_dim = hidden // self.num_heads
        qkv = self.qkv_proj(x, context).view(tokens, 3, self.num_heads, head_dim)
        q, k, v = qkv.unbind(1)
        attended = attend_texts(q, k, v, text_lengths(context), head_dim**-0.5)
        x = self.attention_norm(x + self.o_proj(attended.reshape(tokens, hidden), context))
        return self.output_norm(x + self.down_proj(F.gelu(self.up_proj(x, context)), context))


class BertClasses(NamedTuple):
    """A head that scores classes from a text's first token."""

    dense: Linear
    classes: Linear

    @classmethod
    def load(cls, loader: WeightLoader, root: str, config: BertConfig) -> "BertClasses":
        # RoBERTa's head has both layers; in BERT the pooler is the first layer
        is_roberta = "classifier.dense.weight" in loader
        dense, classes = (
            ("classifier.dense", "classifier.out_proj") if is_roberta else (f"{root}pooler.dense", "classifier")
        )
        hidden = config.hidden_size
        return cls(
            Linear.load(loader, [dense], [hidden], hidden, bias=True),
            Linear.load(loader, [classes], [config.num_classes], hidden, bias=True),
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [texts, classes] for hidden [texts, hidden]."""
        return self.classes.plain(torch.tanh(self.dense.plain(hidden)))


class Bert:
    def __init__(
        self,
        words: torch.Tensor,
        positions: torch.Tensor,
        token_types: torch.Tensor,
        norm: LayerNorm,
        layers: list[BertLayer],
        head: BertClasses | None,
    ) -> None:
        self.words = words
        self.positions = positions
        self.token_types = token_types  # [types, hidden]; type 1, if it exists, is that of a pair's second text
        self.norm = norm
        self.layers = layers
        self.head = head

    def forward(self, context: Context) -> torch.Tensor:
        batch = context.batch
        types = self.token_types[0]
        if batch.token_types is not None and len(self.token_types) > 1:
            types = F.embedding(batch.token_types, self.token_types)
        x = F.embedding(batch.token_ids, self.words) + F.embedding(batch.positions, self.positions) + types
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def logits(self, hidden: torch.Tensor, ranks: object = None) -> torch.Tensor:
        """Return fp32 logits [texts, classes] for hidden [texts, hidden]."""
        assert self.head is not None, "the encoder has no classes, and validation refuses requests for tokens"
        return self.head(hidden).float()


def load(config: BertConfig, loader: WeightLoader, context_length: int) -> Bert:
    norm_name = "embeddings.LayerNorm.weight"
    root = next((root for root in ("bert.", "roberta.") if f"{root}{norm_name}" in loader), "")
    names, hidden = f"{root}embeddings", config.hidden_size
    words = word_table(loader, f"{names}.word_embeddings", config.vocab_size, hidden)
    rows = config.first_position + config.context_length
    positions = loader.tensor(f"{names}.position_embeddings.weight", rows, hidden)[config.first_position :]
    types = loader.tensor(f"{names}.token_type_embeddings.weight", config.num_token_types, hidden)
    norm = LayerNorm.load(loader, f"{names}.LayerNorm", hidden, config.eps)
    layers = [BertLayer.load(loader, f"{root}encoder.layer.{i}", config) for i in range(config.num_encoder_layers)]
    head = BertClasses.load(loader, root, config) if config.num_classes else None
    # Skip unused tensors: poolers and heads for other tasks, and position_ids, which just count from zero.
    loader.skip(rf"{re.escape(root)}(pooler\.dense\.(weight|bias)|embeddings\.position_ids)|cls\..*|lm_head\..*")
    return Bert(words, positions, types, norm, layers, head)


def word_table(loader: WeightLoader, name: str, rows: int, columns: int) -> torch.Tensor:
    """Request a table [rows, columns] of words, which may be stored in codes."""
    return loader.unpacked().matrix([name], [rows], columns).unpack(loader.dtype)

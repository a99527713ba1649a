"""BERT: a bidirectional encoder, whose texts are computed whole, for embeddings alone.

Every token sees every other, so nothing is cached: the model asks for no KV layers and its prompts are never cut. Position and token type are
looked up, norms are LayerNorms behind the residual additions, and there is no head.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pilotlight.engine.description.families.bert_config import BertConfig
from pilotlight.engine.execution.context import Context
from pilotlight.engine.layers.linear import Linear
from pilotlight.engine.layers.norm import LayerNorm
from pilotlight.engine.weights.loader import WeightLoader


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    num_heads: int
    qkv_proj: Linear
    o_proj: Linear
    attention_norm: LayerNorm
    up_proj: Linear
    down_proj: Linear
    output_norm: LayerNorm

    @classmethod
    def load(cls, loader: WeightLoader, name: str, config: BertConfig) -> "EncoderLayer":
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
        """x [tokens, hidden], texts back to back."""
        tokens, hidden = x.shape
        texts = context.batch.groups[0].prefill
        assert texts is not None
        qkv = self.qkv_proj(x, context).view(tokens, 3, self.num_heads, hidden // self.num_heads)
        attended = [_attend(text) for text in torch.split(qkv, list(texts.host_q_lens))]
        x = self.attention_norm(x + self.o_proj(torch.cat(attended).view(tokens, hidden), context))
        return self.output_norm(x + self.down_proj(F.gelu(self.up_proj(x, context)), context))


class Bert:
    def __init__(
        self,
        words: torch.Tensor,
        positions: torch.Tensor,
        token_type: torch.Tensor,
        norm: LayerNorm,
        layers: list[EncoderLayer],
    ) -> None:
        self.words = words
        self.positions = positions
        self.token_type = token_type  # of all tokens
        self.norm = norm
        self.layers = layers

    def forward(self, context: Context) -> torch.Tensor:
        batch = context.batch
        x = F.embedding(batch.token_ids, self.words) + F.embedding(batch.positions, self.positions) + self.token_type
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, context)
        return x

    def logits(self, hidden: torch.Tensor, ranks: object = None) -> torch.Tensor:
        raise AssertionError("an encoder has no head, and validation refuses requests for tokens")


def load(config: BertConfig, loader: WeightLoader, context_length: int) -> Bert:
    words_name = "embeddings.word_embeddings.weight"
    root = next((root for root in ("bert.", "roberta.") if f"{root}{words_name}" in loader), "")
    names, hidden = f"{root}embeddings", config.hidden_size
    words = loader.tensor(f"{root}{words_name}", config.vocab_size, hidden)
    rows = config.first_position + config.context_length
    positions = loader.tensor(f"{names}.position_embeddings.weight", rows, hidden)[config.first_position :]
    types = loader.tensor(f"{names}.token_type_embeddings.weight", config.num_token_types, hidden)
    norm = LayerNorm.load(loader, f"{names}.LayerNorm", hidden, config.eps)
    layers = [EncoderLayer.load(loader, f"{root}encoder.layer.{i}", config) for i in range(config.num_encoder_layers)]
    # The pooler and the heads serve other tasks; position_ids count from zero.
    loader.skip(rf"{re.escape(root)}(pooler\.dense\.(weight|bias)|embeddings\.position_ids)|cls\..*|lm_head\..*")
    return Bert(words, positions, types[0], norm, layers)


def _attend(qkv: torch.Tensor) -> torch.Tensor:
    """qkv [tokens, 3, heads, head_dim] of one text -> [tokens, heads, head_dim]"""
    q, k, v = qkv.permute(1, 2, 0, 3).unbind()
    return F.scaled_dot_product_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))[0].transpose(0, 1)

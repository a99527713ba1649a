"""Tiny random embedding checkpoints as sentence-transformers lays them out, and what their embeddings are by `transformers` alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    BertConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    XLMRobertaConfig,
)

from pilotlight.engine.api.protocol import Pooling
from tests.checkpoints import AWKWARD, write_checkpoint

_DECODER = {key: value for key, value in AWKWARD.items() if value is not None}
BERT = BertConfig(
    vocab_size=431, hidden_size=42, intermediate_size=123, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=96,
    initializer_range=0.15, layer_norm_eps=1e-6, pad_token_id=0,
)  # fmt: skip
XLM_ROBERTA = XLMRobertaConfig(
    vocab_size=431, hidden_size=42, intermediate_size=123, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=98,
    initializer_range=0.15, layer_norm_eps=1e-5, pad_token_id=1, type_vocab_size=1,
)  # fmt: skip
FLAGS: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"
}  # fmt: skip


class Embedder(NamedTuple):
    config: PreTrainedConfig
    pooling: Pooling
    is_normalized: bool
    has_head: bool = False  # saved as the causal model it was made from

    @property
    def is_encoder(self) -> bool:
        return isinstance(self.config, BertConfig | XLMRobertaConfig)


EMBEDDERS: dict[str, Embedder] = {
    "qwen3, last token": Embedder(Qwen3Config(**_DECODER), "last", is_normalized=True),
    "qwen3 with its head, last token": Embedder(Qwen3Config(**_DECODER), "last", is_normalized=True, has_head=True),
    "llama, mean, of any length": Embedder(LlamaConfig(**_DECODER), "mean", is_normalized=False),
    "mistral, mean, window": Embedder(MistralConfig(**_DECODER, sliding_window=9), "mean", is_normalized=True),
    "qwen3, first token": Embedder(Qwen3Config(**_DECODER), "cls", is_normalized=True),
    "bert, first token": Embedder(BERT, "cls", is_normalized=True),
    "bert, mean, of any length": Embedder(BERT, "mean", is_normalized=False),
    "xlm-roberta, mean": Embedder(XLM_ROBERTA, "mean", is_normalized=True),
}
DECODERS = [name for name, embedder in EMBEDDERS.items() if not embedder.is_encoder]


def write_embedder(directory: Path, embedder: Embedder) -> PreTrainedModel:
    """Returns the model behind whose last hidden states the pooling comes."""
    if embedder.has_head:
        model = write_checkpoint(directory, embedder.config).model
    else:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModel.from_config(embedder.config, dtype=torch.float32).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "norm" in name.lower() or name.endswith("bias"):
                        parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(directory)
    write_recipe(directory, embedder.pooling, embedder.is_normalized)
    return model


def write_recipe(directory: Path, pooling: Pooling, is_normalized: bool, **extra: Any) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if is_normalized else [])]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = {flag: mode == pooling for mode, flag in FLAGS.items()}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 42, **flags, **extra}))


@torch.inference_mode()
def reference(model: PreTrainedModel, embedder: Embedder, prompt: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[embedder.pooling]
    return F.normalize(pooled, dim=0) if embedder.is_normalized else pooled

"""Tiny random embedding checkpoints in the layout of sentence-transformers, and their embeddings by `transformers` alone."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    AutoModel,
    BertConfig,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
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
BERT_OF_FIVE_HEADS = BertConfig(
    vocab_size=431, hidden_size=45, intermediate_size=77, num_hidden_layers=2, num_attention_heads=5, max_position_embeddings=96,
    initializer_range=0.15, layer_norm_eps=1e-5, pad_token_id=0,
)  # fmt: skip
XLM_ROBERTA = XLMRobertaConfig(
    vocab_size=431, hidden_size=42, intermediate_size=123, num_hidden_layers=3, num_attention_heads=6, max_position_embeddings=98,
    initializer_range=0.15, layer_norm_eps=1e-5, pad_token_id=1, type_vocab_size=1,
)  # fmt: skip
XLM_ROBERTA_OF_FIVE_HEADS = XLMRobertaConfig(
    vocab_size=431, hidden_size=45, intermediate_size=77, num_hidden_layers=2, num_attention_heads=5, max_position_embeddings=97,
    initializer_range=0.15, layer_norm_eps=1e-6, pad_token_id=0, type_vocab_size=1,
)  # fmt: skip
MODERN_BERT = ModernBertConfig(
    vocab_size=431, hidden_size=42, intermediate_size=57, num_hidden_layers=4, num_attention_heads=3, max_position_embeddings=1200,
    initializer_range=0.15, local_attention=12, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
)  # fmt: skip
MODERN_BERT_OF_BIASES = ModernBertConfig(
    vocab_size=431, hidden_size=42, intermediate_size=57, num_hidden_layers=3, num_attention_heads=7, max_position_embeddings=96,
    initializer_range=0.15, local_attention=9, **{"global_attn_every_n_layers": 2}, norm_bias=True, attention_bias=True, mlp_bias=True,
    classifier_bias=True, classifier_pooling="mean", pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 50_000.0}, "sliding_attention": {"rope_type": "default"}},
)  # fmt: skip
_GEMMA: dict[str, Any] = {
    key: value for key, value in _DECODER.items() if key not in ("rope_parameters", "tie_word_embeddings")
} | {"sliding_window_pattern": 3}
EMBEDDING_GEMMA = Gemma3TextConfig(
    **_GEMMA, sliding_window=9, query_pre_attn_scalar=17, use_bidirectional_attention=True
)
EMBEDDING_GEMMA_OF_ONE_KV_HEAD = Gemma3TextConfig(
    **_GEMMA | {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 14, "sliding_window_pattern": 2},
    sliding_window=14,
    query_pre_attn_scalar=7,
    use_bidirectional_attention=True,
)
FLAGS: dict[Pooling, str] = {
    "mean": "pooling_mode_mean_tokens", "last": "pooling_mode_lasttoken", "cls": "pooling_mode_cls_token"
}  # fmt: skip


class Embedder(NamedTuple):
    config: PreTrainedConfig
    pooling: Pooling
    is_normalized: bool
    has_head: bool = False  # saved as a causal model, with its output layer
    dense: tuple[int, ...] = ()  # output sizes of the linear layers after the pooling

    @property
    def is_encoder(self) -> bool:
        is_bidirectional = getattr(self.config, "use_bidirectional_attention", False)
        return is_bidirectional or isinstance(self.config, BertConfig | XLMRobertaConfig | ModernBertConfig)

    @property
    def vector_size(self) -> int:
        return self.dense[-1] if self.dense else int(self.config.hidden_size)


EMBEDDERS: dict[str, Embedder] = {
    "qwen3, last token": Embedder(Qwen3Config(**_DECODER), "last", is_normalized=True),
    "qwen3 with its head, last token": Embedder(Qwen3Config(**_DECODER), "last", is_normalized=True, has_head=True),
    "llama, mean, of any length": Embedder(LlamaConfig(**_DECODER), "mean", is_normalized=False),
    "mistral, mean, window": Embedder(MistralConfig(**_DECODER, sliding_window=9), "mean", is_normalized=True),
    "qwen3, first token": Embedder(Qwen3Config(**_DECODER), "cls", is_normalized=True),
    "bert, first token": Embedder(BERT, "cls", is_normalized=True),
    "bert, mean, of any length": Embedder(BERT_OF_FIVE_HEADS, "mean", is_normalized=False),
    "xlm-roberta, mean": Embedder(XLM_ROBERTA, "mean", is_normalized=True),
    "xlm-roberta, five heads, first token": Embedder(XLM_ROBERTA_OF_FIVE_HEADS, "cls", is_normalized=True),
    "modernbert, first token": Embedder(MODERN_BERT, "cls", is_normalized=True),
    "modernbert with biases, mean": Embedder(MODERN_BERT_OF_BIASES, "mean", is_normalized=False),
    "embeddinggemma, mean and two layers": Embedder(EMBEDDING_GEMMA, "mean", is_normalized=True, dense=(57, 30)),
    "embeddinggemma, one kv head, mean": Embedder(EMBEDDING_GEMMA_OF_ONE_KV_HEAD, "mean", is_normalized=False),
}
DECODERS = [name for name, embedder in EMBEDDERS.items() if not embedder.is_encoder]


def write_embedder(directory: Path, embedder: Embedder) -> PreTrainedModel:
    """Write a checkpoint; return its model, which gives the hidden states to pool."""
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
    write_recipe(
        directory, embedder.pooling, embedder.is_normalized, embedder.dense, hidden_size=embedder.config.hidden_size
    )
    return model


def write_recipe(
    directory: Path,
    pooling: Pooling,
    is_normalized: bool,
    dense: tuple[int, ...] = (),
    hidden_size: int = 42,
    **extra: Any,
) -> None:
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")]
    inputs = hidden_size
    for number, outputs in enumerate(dense, 2):
        kinds.append((f"{number}_Dense", "Dense"))
        write_dense(directory / f"{number}_Dense", inputs, outputs, has_bias=number > 2)
        inputs = outputs
    if is_normalized:
        kinds.append((f"{len(kinds)}_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = {flag: mode == pooling for mode, flag in FLAGS.items()}
    described = {"word_embedding_dimension": hidden_size, **flags, **extra}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(described))


def write_dense(directory: Path, inputs: int, outputs: int, *, has_bias: bool) -> None:
    """Write a Dense module.

    Its activation is tanh with a bias, and the identity without one, as in EmbeddingGemma.
    """
    directory.mkdir(exist_ok=True)
    config = {"in_features": inputs, "out_features": outputs, "bias": has_bias}
    kind = "activation.Tanh" if has_bias else "linear.Identity"
    (directory / "config.json").write_text(json.dumps({**config, "activation_function": f"torch.nn.modules.{kind}"}))
    save_file(_dense_weights(inputs, outputs, has_bias), directory / "model.safetensors")


def _dense_weights(inputs: int, outputs: int, has_bias: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(inputs)
    weights = {"linear.weight": torch.randn(outputs, inputs, generator=generator) * inputs**-0.5}
    return weights | ({"linear.bias": torch.randn(outputs, generator=generator)} if has_bias else {})


@torch.inference_mode()
def reference(model: PreTrainedModel, embedder: Embedder, prompt: list[int]) -> torch.Tensor:
    hidden = model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[embedder.pooling]
    for number, outputs in enumerate(embedder.dense, 2):
        weights = _dense_weights(len(pooled), outputs, number > 2)
        pooled = F.linear(pooled, weights["linear.weight"], weights.get("linear.bias"))
        pooled = pooled.tanh() if number > 2 else pooled
    return F.normalize(pooled, dim=0) if embedder.is_normalized else pooled

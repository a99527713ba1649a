"""Families of encoders in GGUF files, and their steps from hidden states to embeddings.

llama.cpp's converter (conversion/bert.py and gemma.py, https://github.com/ggml-org/llama.cpp) omits the first rows of RoBERTa's table of positions,
which no token has, so that its files are BERT's.
"""

import json
from functools import partial
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.decoders import GEMMA_LAYERS, dense, gemma3
from pilotlight.engine.gguf.family import GgufFamily, GgufHeader, NamedTensor, norm_eps
from pilotlight.engine.gguf.file import GgufTensor

_BERT_LAYERS = {
    "attn_q": "attention.self.query", "attn_k": "attention.self.key", "attn_v": "attention.self.value", "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm", "ffn_up": "intermediate.dense", "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}  # fmt: skip
_BERT_OUTER = {
    "token_embd": "embeddings.word_embeddings", "position_embd": "embeddings.position_embeddings", "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm", "cls": "classifier.dense", "cls.output": "classifier.out_proj",
}  # fmt: skip
_MODERN_LAYERS = {
    "attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo", "ffn_norm": "mlp_norm", "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo",
}  # fmt: skip
_MODERN_OUTER = {
    "token_embd": "embeddings.tok_embeddings", "token_embd_norm": "embeddings.norm", "output_norm": "final_norm"
}  # fmt: skip
# llama.cpp's numbers of poolings, with the names of sentence-transformers.
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_DENSE = ("dense_2", "dense_3")  # layers after the pooling of EmbeddingGemma, in files that have them
_CLASSES = "cls.output.weight"  # the head of a classifier or reranker


def bert_variant(header: GgufHeader) -> str:
    """Return the name in ENCODERS of a file of the architecture bert."""
    return "bert with classes" if header.has(_CLASSES) else "bert"


def recipe_files(header: GgufHeader) -> dict[str, str | NamedTensor]:
    """Return the files of sentence-transformers that describe how the model makes embeddings, if it does.

    Embeddings get length 1, as from llama.cpp's server. Raises CheckpointError for an unsupported pooling.
    """
    pooling = header.integer("{arch}.pooling_type", 0)
    if not pooling or header.has(_CLASSES):
        return {}
    if pooling not in _POOLINGS:
        raise CheckpointError(
            f"{header.origin} has {header.architecture}.pooling_type = {pooling}; supported are {', '.join(map(str, _POOLINGS))}"
        )
    files: dict[str, str | NamedTensor] = {"1_Pooling/config.json": json.dumps({"pooling_mode": _POOLINGS[pooling]})}
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    for name in _DENSE:
        stored = header.file.tensors.get(f"{name}.weight")
        if stored is None:
            continue
        folder = f"{name.removeprefix('dense_')}_Dense"
        kinds[folder] = "Dense"
        files |= {
            f"{folder}/config.json": json.dumps(_dense_config(header, stored)),
            f"{folder}/model.safetensors": NamedTensor("linear.weight", stored, content=header.file.content(stored)),
        }
    kinds["Normalize"] = "Normalize"
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    return {"modules.json": json.dumps(modules), **files}


def _dense_config(header: GgufHeader, stored: GgufTensor) -> dict[str, Any]:
    if stored.kind.plain is None or len(stored.shape) != 2:
        raise CheckpointError(
            f"tensor {stored.name} in {header.origin} has type {stored.kind.name} and shape {list(stored.shape)}; "
            "supported are matrices of F32, F16 or BF16"
        )
    rows, columns = stored.shape
    activation = "torch.nn.modules.linear.Identity"
    return {"in_features": columns, "out_features": rows, "bias": False, "activation_function": activation}


def _bert(header: GgufHeader) -> dict[str, Any]:
    _require_both_sides(header)
    _require(header, "token_types.weight")
    return {
        **dense(header),
        "layer_norm_eps": norm_eps(header),
        "type_vocab_size": header.file.tensors["token_types.weight"].shape[0],
    }


def _require(header: GgufHeader, tensor: str) -> None:
    if not header.has(tensor):
        raise CheckpointError(f"{header.origin} lacks the tensor {tensor}")


def _require_both_sides(header: GgufHeader) -> None:
    if header.flag("{arch}.attention.causal", True):
        raise CheckpointError(f"{header.origin} hides later tokens, which is not supported for {header.architecture}")


def _bert_with_classes(header: GgufHeader) -> dict[str, Any]:
    _require(header, "cls.weight")  # the converter omits this layer of BERT's, but not of RoBERTa's
    key, rows = "{arch}.classifier.output_labels", header.file.tensors[_CLASSES].shape[0]
    labels = header.texts(key) if key in header else [f"LABEL_{i}" for i in range(rows)]
    return {**_bert(header), "id2label": {str(i): label for i, label in enumerate(labels)}}


def _modern_bert(header: GgufHeader) -> dict[str, Any]:
    _require_both_sides(header)
    return {
        **dense(header),
        "norm_eps": norm_eps(header),
        "hidden_activation": header.text("{arch}.hidden_activation", "gelu"),
        "local_attention": header.integer("{arch}.attention.sliding_window"),
        "global_attn_every_n_layers": header.integer("{arch}.attention.sliding_window_pattern", 3),
        "global_rope_theta": header.number("{arch}.rope.freq_base"),
        "local_rope_theta": header.number("{arch}.rope.freq_base_swa", 10_000.0),
        "norm_bias": header.has("output_norm.bias"),
        "attention_bias": header.has("blk.0.attn_qkv.bias"),
        "mlp_bias": header.has("blk.0.ffn_up.bias"),
    }


def _embedding_gemma(header: GgufHeader) -> dict[str, Any]:
    header.flag("{arch}.attention.causal", False)  # files have true, which llama.cpp ignores, or nothing
    return {
        **gemma3(header),
        "sliding_window_pattern": header.integer("{arch}.attention.sliding_window_pattern", 6),
        "query_pre_attn_scalar": header.integer("{arch}.attention.key_length"),
        "use_bidirectional_attention": True,
    }


_bert_family = partial(GgufFamily, layers=_BERT_LAYERS, outer=_BERT_OUTER, prefix="encoder.layer.")
ENCODERS: dict[str, GgufFamily] = {
    "bert": _bert_family("BertModel", _bert),
    "bert with classes": _bert_family("BertForSequenceClassification", _bert_with_classes),
    "modern-bert": GgufFamily(
        "ModernBertModel",
        _modern_bert,
        _MODERN_LAYERS,
        outer=_MODERN_OUTER,
        prefix="layers.",
        rope_keys=("freq_base_swa",),
    ),
    "gemma-embedding": GgufFamily(
        "Gemma3TextModel", _embedding_gemma, GEMMA_LAYERS, outer=dict.fromkeys(_DENSE, ""), rope_keys=("freq_base_swa",)
    ),
}

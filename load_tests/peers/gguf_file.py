"""A checkpoint of Llama's shape as GGUF, the file that llama.cpp reads: the same bf16 weights.

A tokenizer.json beside the checkpoint adds tokens and merges, with GPT-2's pre-tokenizer: a server can then answer, but may tokenize text differently
from ours. Only this architecture is supported. Uses llama.cpp's own `gguf` package, whose folder the caller names.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

NAME = "model.gguf"
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5  # llama.cpp's token types


def write_gguf(folder: Path, gguf_package: Path, directory: Path) -> Path:
    """Write `model.gguf` in `folder`, from the checkpoint in `directory`.

    Atomic; keeps an existing file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / NAME
    if target.exists():
        return target
    sys.path.insert(0, str(gguf_package))
    import gguf

    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"only checkpoints of Llama's shape are written as GGUF, not {config['model_type']!r}")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    partial = folder / f"{NAME}.partial"
    writer = gguf.GGUFWriter(str(partial), "llama", use_temp_file=False)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _add_tokenizer(writer, directory / "tokenizer.json", config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor = tensors.get_tensor(name).bfloat16()
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    tensor = _neighbours(tensor, heads if "q_proj" in name else kv_heads)
                plain = tensor.float().numpy() if tensor.dim() == 1 else tensor.contiguous().view(torch.uint8).numpy()
                kind = None if tensor.dim() == 1 else gguf.GGMLQuantizationType.BF16
                writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), plain, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def _neighbours(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder queries and keys as llama.cpp's converter does.

    llama.cpp rotates pairs of neighbouring dimensions; the checkpoint pairs dimensions of two halves.
    """
    per_head = rows.shape[0] // heads
    return rows.view(heads, 2, per_head // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _add_tokenizer(writer: Any, file: Path, config: dict[str, Any]) -> None:
    if not file.exists():
        writer.add_tokenizer_model("no_vocab")
        return
    known = json.loads(file.read_text())
    tokens = [f"<unused{i}>" for i in range(config["vocab_size"])]
    types = [_UNUSED] * config["vocab_size"]
    for text, token_id in known["model"]["vocab"].items():
        tokens[token_id], types[token_id] = text, _NORMAL
    for added in known["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], _CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in known["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)

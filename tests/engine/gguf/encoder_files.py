"""A writer of GGUF files of encoders, with the values that llama.cpp's converter would write (its conversion/bert.py and gemma.py). Names of tensors
come from llama.cpp's package `gguf`.
"""

from pathlib import Path
from typing import Any

import gguf
from safetensors.torch import load_file
from transformers import PreTrainedConfig

from tests.engine.gguf.files import Kind

_ARCHITECTURES = {
    "bert": gguf.MODEL_ARCH.BERT, "roberta": gguf.MODEL_ARCH.BERT, "xlm-roberta": gguf.MODEL_ARCH.BERT,
    "modernbert": gguf.MODEL_ARCH.MODERN_BERT, "gemma3_text": gguf.MODEL_ARCH.GEMMA_EMBEDDING,
}  # fmt: skip
_POOLINGS = {"mean": 1, "cls": 2, "last": 3}
_UNUSED = ("pooler", "embeddings.position_ids")


def write_encoder(
    checkpoint: Path, config: PreTrainedConfig, pooling: str | None, kind: Kind = Kind.F32, **extra: Any
) -> Path:
    """Write a checkpoint's file. `extra`: further keys, without the architecture's name."""
    c, file = config.to_dict(), checkpoint / "encoder.gguf"
    architecture = _ARCHITECTURES[c["model_type"]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    first_position = c["pad_token_id"] + 1 if "roberta" in c["model_type"] else 0
    keys = {
        "block_count": c["num_hidden_layers"], "context_length": c["max_position_embeddings"] - first_position,
        "embedding_length": c["hidden_size"], "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
        **({"pooling_type": _POOLINGS[pooling]} if pooling else {}), **_own(c), **extra,
    }  # fmt: skip
    for key, value in keys.items():
        add: Any = {bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](f"{writer.arch}.{key}", value)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(architecture, c["num_hidden_layers"])
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        name = name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model.")
        if name.startswith(_UNUSED):
            continue
        if "position_embeddings" in name:
            tensor = tensor[first_position:].contiguous()
        if c["model_type"] == "gemma3_text":
            name = f"model.{name}"
            tensor = tensor + 1 if name.endswith("norm.weight") else tensor
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        is_plain = tensor.ndim < 2 or found.startswith(("position_embd", "token_types", "cls"))
        of = Kind.F32 if is_plain else kind
        writer.add_tensor(found, gguf.quants.quantize(tensor.numpy(), of), raw_dtype=of)
    for number in (2, 3):  # layers after the pooling
        layer = checkpoint / f"{number}_Dense" / "model.safetensors"
        if layer.exists():
            writer.add_tensor(f"dense_{number}.weight", load_file(layer)["linear.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _own(c: dict[str, Any]) -> dict[str, Any]:
    """Return the keys that other architectures do not have."""
    if c["model_type"] == "gemma3_text":
        return {
            "attention.head_count_kv": c["num_key_value_heads"], "attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"],
            "attention.layer_norm_rms_epsilon": c["rms_norm_eps"], "attention.sliding_window": c["sliding_window"],
            "rope.freq_base": c["rope_parameters"]["full_attention"]["rope_theta"],
        }  # fmt: skip
    if c["model_type"] == "modernbert":
        bases = [c["rope_parameters"][f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")]
        return {
            "attention.causal": False, "attention.layer_norm_epsilon": c["norm_eps"], "attention.sliding_window": c["local_attention"],
            "rope.freq_base": float(bases[0]), "rope.freq_base_swa": float(bases[1]),
        }  # fmt: skip
    return {"attention.causal": False, "attention.layer_norm_epsilon": c["layer_norm_eps"]}

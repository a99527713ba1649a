"""A writer of GGUF files through llama.cpp's package `gguf`, and of checkpoints with the same values. Tensor names come from that package. Changes of
values by llama.cpp's converter are repeated here, from its conversion/llama.py and gemma.py.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.engine.families import config

SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3, "gemma2": gguf.MODEL_ARCH.GEMMA2, "granite": gguf.MODEL_ARCH.GRANITE,
    "olmo2": gguf.MODEL_ARCH.OLMO2, "phi3": gguf.MODEL_ARCH.PHI3, "smollm3": gguf.MODEL_ARCH.SMOLLM3, "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA, "olmo3": gguf.MODEL_ARCH.OLMO2, "olmoe": gguf.MODEL_ARCH.OLMOE, "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "exaone4": gguf.MODEL_ARCH.EXAONE4, "ernie4_5": gguf.MODEL_ARCH.ERNIE4_5, "seed_oss": gguf.MODEL_ARCH.SEED_OSS,
    "glm4": gguf.MODEL_ARCH.GLM4, "granitemoe": gguf.MODEL_ARCH.GRANITE_MOE, "minimax_m2": gguf.MODEL_ARCH.MINIMAXM2,
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE, "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE,
}  # fmt: skip
TURNED = ("llama", "mistral", "mixtral", "granite", "granitemoe", "smollm3")
Kind = gguf.GGMLQuantizationType


def write_both(
    folder: Path, family: Any, kind: Kind = Kind.F32, extra: dict[str, Any] | None = None, **changes: Any
) -> tuple[Path, Path]:
    """Write a checkpoint and a GGUF file with the same values; return both paths. Matrices have the type `kind`, and the checkpoint its rounded
    values."""
    directory, file = folder / "checkpoint", folder / "tiny.gguf"
    write_checkpoint(directory, config(family, **(SHAPE | changes)))
    write_tokenizer(directory)
    described = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    rounded = {name: rounded_as(tensor, kind) if is_matrix(name) else tensor for name, tensor in tensors.items()}
    save_file(rounded, directory / "model.safetensors")
    write_file(file, described, tensors, kind, directory, extra or {})
    return directory, file


def is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "embed_tokens.weight", "lm_head.weight"))


def rounded_as(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind)).clone()


def write_file(
    file: Path,
    described: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kind: Kind,
    directory: Path,
    extra: dict[str, Any],
) -> None:
    architecture = ARCHITECTURES[described["model_type"]]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    _add_sizes(writer, described)
    _add_tokenizer(writer, directory)
    for key, value in extra.items():
        add: Any = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    names = gguf.get_tensor_name_map(architecture, described["num_hidden_layers"])
    for name, tensor in _stacked(tensors).items():
        values = _as_converted(name, tensor, described)
        wanted = kind if is_matrix(name) else Kind.F32
        stored = gguf.quants.quantize(values.float().numpy(), wanted)
        name = name.replace("_correction_bias", "_correction.bias")
        writer.add_tensor(str(names.get_name(name, try_suffixes=(".weight", ".bias"))), stored, raw_dtype=wanted)
    if described["model_type"] == "glm4_moe":  # one tensor of the layer that predicts a further token
        writer.add_tensor(f"blk.{described['num_hidden_layers']}.nextn.enorm.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_converted(name: str, tensor: torch.Tensor, described: dict[str, Any]) -> torch.Tensor:
    if described["model_type"] in TURNED and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = described["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if described["model_type"] in ("gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor.squeeze()


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Join the experts of each layer in one tensor, as in GGUF files."""
    found: dict[str, Any] = {}
    for name in [name for name in tensors if name.endswith("block_sparse_moe.input_linear.weight")]:  # Granite's stacks
        stem = name.replace("block_sparse_moe.input_linear.weight", "mlp.experts")
        gates, ups = tensors[name].chunk(2, 1)
        tensors = {key: tensor for key, tensor in tensors.items() if key != name}
        tensors |= {f"{stem}.gate_proj.weight": gates, f"{stem}.up_proj.weight": ups}
    for name in sorted(tensors, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        whole = re.sub(r"experts\.\d+\.", "experts.", name)
        whole = re.sub(r"model\.layers\.(\d+)\.block_sparse_moe\.experts", r"layers.\1.feed_forward.experts", whole)
        found.setdefault(whole, []).append(tensors[name])
    return {name: of[0] if len(of) == 1 else torch.stack(of) for name, of in found.items()}


def _add_sizes(writer: gguf.GGUFWriter, described: dict[str, Any]) -> None:
    writer.add_context_length(described["max_position_embeddings"])
    writer.add_embedding_length(described["hidden_size"])
    writer.add_block_count(described["num_hidden_layers"] + (described["model_type"] == "glm4_moe"))
    writer.add_feed_forward_length(described["intermediate_size"])
    writer.add_head_count(described["num_attention_heads"])
    writer.add_head_count_kv(described["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(described["rms_norm_eps"])
    if "head_dim" in described:
        writer.add_key_length(described["head_dim"])
        writer.add_value_length(described["head_dim"])
    rope = described["rope_parameters"]
    if described["model_type"] == "olmo3" or rope.get("sliding_attention", {}).get("rope_theta", 10_000.0) != 10_000.0:
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])  # newer files
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if described.get("sliding_window"):
        writer.add_sliding_window(described["sliding_window"])
    if described["model_type"] in ("granite", "granitemoe"):
        writer.add_attention_scale(described["attention_multiplier"])
        writer.add_embedding_scale(described["embedding_multiplier"])
        writer.add_residual_scale(described["residual_multiplier"])
        writer.add_logit_scale(described["logits_scaling"])
    if described["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(described["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(described["final_logit_softcapping"])
    if described["model_type"] in ("olmo3", "exaone4") and described.get("sliding_window"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in described["layer_types"]])
    if rope.get("partial_rotary_factor", 1.0) < 1.0:
        writer.add_rope_dimension_count(int(described["head_dim"] * rope["partial_rotary_factor"]))
    if "num_experts_per_tok" in described:
        count = next(key for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in described)
        writer.add_expert_count(described[count])
        writer.add_expert_used_count(described["num_experts_per_tok"])
    if "moe_intermediate_size" in described:
        writer.add_expert_feed_forward_length(described["moe_intermediate_size"])
    if described["model_type"] == "glm4_moe":
        writer.add_nextn_predict_layers(1)
        writer.add_expert_shared_count(described["n_shared_experts"])
        writer.add_leading_dense_block_count(described["first_k_dense_replace"])
        writer.add_expert_weights_scale(described["routed_scaling_factor"])
        writer.add_expert_weights_norm(described["norm_topk_prob"])
    if described["model_type"] == "minimax_m2":
        writer.add_expert_feed_forward_length(described["intermediate_size"])
    if described["model_type"] == "ernie4_5_moe":
        writer.add_expert_count(described["moe_num_experts"])
        writer.add_expert_used_count(described["moe_k"])
        writer.add_expert_shared_count(described["moe_num_shared_experts"])
        writer.add_interleave_moe_layer_step(described["moe_layer_interval"])
        writer.add_leading_dense_block_count(described["moe_layer_start_index"])
    if "shared_expert_intermediate_size" in described:
        writer.add_expert_shared_feed_forward_length(described["shared_expert_intermediate_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    known = json.loads((directory / "tokenizer.json").read_text())
    added = {token["id"]: token["special"] for token in known["added_tokens"]}
    tokens = sorted(known["model"]["vocab"], key=known["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if added.get(i) else gguf.TokenType.NORMAL for i in range(len(tokens))]
    )
    writer.add_token_merges([" ".join(pair) for pair in known["model"]["merges"]])
    writer.add_eos_token_id(1)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray[Any, Any]:
    """Return random blocks of codes [rows, bytes] with finite scales, for kinds that the package cannot write."""
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(7).integers(0, 256, (rows, columns // block, num_bytes), dtype=np.uint8)
    places = {
        Kind.Q6_K: [208],
        Kind.Q3_K: [108],
        Kind.Q4_K: [0, 2],
        Kind.Q5_K: [0, 2],
        Kind.Q4_1: [0, 2],
        Kind.Q5_1: [0, 2],
    }.get(kind, [0])
    for place in places:
        scales = np.random.default_rng(place).normal(0, 0.01, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)

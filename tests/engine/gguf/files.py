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

from pilotlight.engine.description.tensor_sizes import XIELU_PARTS
from tests.checkpoints import write_checkpoint, write_tokenizer
from tests.engine.families import config
from tests.engine.gguf.sizes import WITH_NEXTN, add_sizes, rope_factors

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
    "ernie4_5_moe": gguf.MODEL_ARCH.ERNIE4_5_MOE, "glm4_moe": gguf.MODEL_ARCH.GLM4_MOE, "deepseek_v2": gguf.MODEL_ARCH.DEEPSEEK2,
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2, "glm4_moe_lite": gguf.MODEL_ARCH.DEEPSEEK2, "mistral4": gguf.MODEL_ARCH.MISTRAL4,
    "ministral3": gguf.MODEL_ARCH.MISTRAL3, "gpt_oss": gguf.MODEL_ARCH.GPT_OSS, "llama4_text": gguf.MODEL_ARCH.LLAMA4,
    "mimo_v2_flash": gguf.MODEL_ARCH.MIMO2, "gemma4_text": gguf.MODEL_ARCH.GEMMA4,
    "cohere": gguf.MODEL_ARCH.COMMAND_R, "cohere2": gguf.MODEL_ARCH.COHERE2, "arcee": gguf.MODEL_ARCH.ARCEE,
    "apertus": gguf.MODEL_ARCH.APERTUS, "gemma": gguf.MODEL_ARCH.GEMMA, "glm": gguf.MODEL_ARCH.CHATGLM,
    "hunyuan_v1_dense": gguf.MODEL_ARCH.HUNYUAN_DENSE, "hunyuan_v1_moe": gguf.MODEL_ARCH.HUNYUAN_MOE, "dots1": gguf.MODEL_ARCH.DOTS1,
    "exaone_moe": gguf.MODEL_ARCH.EXAONE_MOE, "afmoe": gguf.MODEL_ARCH.AFMOE,
}  # fmt: skip
TURNED = ("llama", "mistral", "ministral3", "mixtral", "granite", "granitemoe", "smollm3", "arcee")
Kind = gguf.GGMLQuantizationType


def write_both(
    folder: Path,
    family: Any,
    kind: Kind = Kind.F32,
    extra: dict[str, Any] | None = None,
    of_experts: Kind | None = None,
    architecture: Any = None,
    is_old: bool = False,
    **changes: Any,
) -> tuple[Path, Path]:
    """Write a checkpoint and a GGUF file with the same values; return both paths. Matrices have the type `kind`, those of experts `of_experts`, and
    the checkpoint the rounded values. `architecture`: that of the file, if it is not the family's. `is_old`: keys and values are not divided."""
    directory, file = folder / "checkpoint", folder / "tiny.gguf"
    write_checkpoint(directory, config(family, **(SHAPE | changes)))
    write_tokenizer(directory)
    described = json.loads((directory / "config.json").read_text()) | {"is_old": is_old}
    described["architecture"] = architecture or ARCHITECTURES[described["model_type"]]
    tensors = load_file(directory / "model.safetensors")
    write_file(file, described, tensors, (kind, of_experts or kind), directory, extra or {})
    for name, tensor in tensors.items():
        for part, values in parts(name, tensor, described).items():
            if is_matrix(part):
                values.copy_(rounded_as(values, of_experts if of_experts and ".experts." in part else kind))
    save_file(tensors, directory / "model.safetensors")
    return directory, file


def is_matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight", "embed_tokens.weight", "lm_head.weight"))


def rounded_as(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
    return torch.from_numpy(
        gguf.quants.dequantize(gguf.quants.quantize(tensor.contiguous().numpy(), kind), kind)
    ).clone()


def write_file(
    file: Path,
    described: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    kinds: tuple[Kind, Kind],
    directory: Path,
    extra: dict[str, Any],
) -> None:
    architecture = described["architecture"]
    writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
    add_sizes(writer, described)
    _add_tokenizer(writer, directory)
    for key, value in extra.items():
        add: Any = {
            str: writer.add_string,
            float: writer.add_float32,
            int: writer.add_uint32,
            list: writer.add_array,
            bool: writer.add_bool,
        }[type(value)]
        add(key, value)
    for part in XIELU_PARTS if described["model_type"] == "apertus" else ():
        of_layers = [tensors[f"model.layers.{i}.mlp.act_fn.{part}"] for i in range(described["num_hidden_layers"])]
        writer.add_array(f"xielu.{part}", [float(one) for one in of_layers])
    names = gguf.get_tensor_name_map(architecture, described["num_hidden_layers"])
    divided = {part: of for name, tensor in tensors.items() for part, of in parts(name, tensor, described).items()}
    for name, tensor in _stacked(divided).items():
        values = _as_converted(name, tensor, described)
        wanted = kinds[".experts." in name] if is_matrix(name) else Kind.F32
        stored = gguf.quants.quantize(values.float().contiguous().numpy(), wanted)
        name = name.replace("_correction_bias", "_correction.bias").replace(".expert_bias", ".expert_bias.bias")
        known = _router_scale(name) or names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(str(known), stored, raw_dtype=wanted)
    if factors := rope_factors(described):
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    if described["model_type"] in WITH_NEXTN:  # one tensor of the layer that predicts a further token
        writer.add_tensor(f"blk.{described['num_hidden_layers']}.nextn.enorm.weight", np.ones(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _router_scale(name: str) -> str | None:
    """Return the name in a file of a scale of Gemma 4's router, which the converter names, not the package."""
    layer, _, part = name.removeprefix("model.layers.").partition(".router.")
    stem = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}.get(part)
    return None if stem is None else f"blk.{layer}.{stem}.scale"


def parts(name: str, tensor: torch.Tensor, described: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what a file has instead of a tensor of the checkpoint, as views of that tensor."""
    kind = described["model_type"]
    if ".act_fn." in name:  # in the metadata of files
        return {}
    if name.endswith("kv_b_proj.weight") and not described["is_old"]:
        heads, key = described["num_attention_heads"], described["qk_nope_head_dim"]
        keys, values = tensor.unflatten(0, (heads, -1)).split([key, described["v_head_dim"]], dim=1)
        return {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
    if name.endswith(("sinks", "sink_bias", "layer_scalar")):
        return {f"{name}.weight": tensor}
    if name.endswith("down_proj_bias"):
        return {name.replace("_bias", ".bias"): tensor}
    if name.endswith("gate_up_proj_bias"):
        return {
            name.replace("gate_up_proj_bias", f"{part}_proj.bias"): tensor[:, i::2]
            for i, part in enumerate(("gate", "up"))
        }
    if not name.endswith(("gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    if kind == "gemma4_text" or described["architecture"] == gguf.MODEL_ARCH.MISTRAL4:
        return {f"{name}.weight": tensor}
    rows = tensor if kind == "mistral4" else tensor.transpose(1, 2)
    if name.endswith("down_proj"):
        return {f"{name}.weight": rows}
    gate, up = (rows[:, ::2], rows[:, 1::2]) if kind == "gpt_oss" else rows.chunk(2, dim=1)
    return {name.replace("gate_up_proj", "gate_proj.weight"): gate, name.replace("gate_up_proj", "up_proj.weight"): up}


def _as_converted(name: str, tensor: torch.Tensor, described: dict[str, Any]) -> torch.Tensor:
    if described["model_type"] in TURNED and name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = described["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
        return tensor.view(heads, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    if described["model_type"] in ("gemma", "gemma2", "gemma3_text") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor if tensor.dim() == 1 else tensor.squeeze()


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
    if kind == Kind.MXFP4:  # each block begins with the exponent of its scale
        blocks[..., 0] = np.random.default_rng(0).integers(118, 126, blocks.shape[:2])
        return blocks.reshape(rows, -1)
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

"""Quantizers of checkpoints, from the published descriptions of the formats; the reference model gets the same rounded values. They do not use the
engine's code.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.checkpoints import write_checkpoint
from tests.engine.families import config

Parts = tuple[dict[str, Tensor], Tensor]  # tensors of a quantized matrix, and its rounded values
Quantizer = Callable[[Tensor], Parts]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_quantized(
    directory: Path,
    kind: Any,
    quantizer: Quantizer,
    described: dict[str, Any],
    *,
    left_alone: str = "lm_head",
    **changes: Any,
) -> PreTrainedModel:
    """Write a tiny checkpoint whose linear layers are quantized, except the head, routers, and layers whose name contains `left_alone`.

    Returns the model of `transformers` with the rounded values.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = write_checkpoint(directory, config(kind, **(sizes | changes)))
    rounded, stored = load_file(directory / "model.safetensors"), {}
    for name, tensor in apart(rounded).items():
        stem = name.removesuffix(".weight")
        is_matrix = name.endswith("_proj.weight") or name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
        if not is_matrix or left_alone in name:
            stored[name] = tensor.contiguous()
            continue
        parts, values = quantizer(tensor.contiguous())
        stored |= {f"{stem}.{part}": of_part.contiguous() for part, of_part in parts.items()}
        tensor.copy_(values)
    save_file(stored, directory / "model.safetensors")
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"quantization_config": described}))
    reference = type(model).from_pretrained(None, config=model.config, state_dict=rounded, dtype=torch.float32).eval()
    reference.set_experts_implementation("eager")
    return reference


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Separate experts that are stacked, with gates and ups in one tensor: quantizers write them one by one.

    Stacks are [experts, rows, columns], but Llama 4's [experts, columns, rows]. Returns views of the tensors.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        if part not in ("gate_up_proj", "down_proj"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for i, expert in enumerate(tensor):
            rows_first = expert.T if ".feed_forward." in name else expert
            pieces = zip(parts, rows_first.chunk(len(parts)), strict=True)
            found |= {f"{stem}.{i}.{one}.weight": rows for one, rows in pieces}
    return found


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Pack codes 0 to 15, [rows, n], into int32 words [rows, n / 8]. Code i of a word, counted from the lowest bits, is that of column order[i] of
    the word's eight columns."""
    rows, n = codes.shape
    padded = torch.cat((codes, torch.zeros(rows, -n % 8, dtype=codes.dtype)), dim=1).long()
    packed = torch.zeros(rows, padded.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate(order):
        packed += padded[:, column::8] << (4 * i)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def rounded(
    weight: Tensor, group: int, symmetric: bool, g_idx: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round a matrix [rows, columns] to four bits.

    Returns codes 0 to 15, scales and zeros [rows, groups], and the rounded values.
    """
    columns = weight.shape[1]
    g_idx = torch.arange(columns) // group if g_idx is None else g_idx
    groups = columns // group
    codes = torch.zeros(weight.shape, dtype=torch.int64)
    scales, zeros = torch.zeros(weight.shape[0], groups), torch.zeros(weight.shape[0], groups, dtype=torch.int64)
    values = torch.zeros_like(weight)
    for i in range(groups):
        part = weight[:, g_idx == i]
        if symmetric:
            scale, zero = part.abs().amax(1) / 7.5, torch.full((weight.shape[0],), 8)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scale = (high - low) / 15
            zero = (-low / scale).round().clamp(1, 15).long()
        scale = scale.half().float()  # stored in fp16
        code = ((part / scale[:, None]).round() + zero[:, None]).clamp(0, 15).long()
        codes[:, g_idx == i], scales[:, i], zeros[:, i] = code, scale, zero
        values[:, g_idx == i] = (code - zero[:, None]).float() * scale[:, None]
    return codes, scales, zeros, values


def compressed_tensors(
    weight: Tensor, group: int | None = 32, symmetric: bool = True, scattered: bool = False
) -> Parts:
    columns = weight.shape[1]
    g_idx = scattered_groups(columns, group or columns) if scattered else None
    codes, scales, zeros, values = rounded(weight, group or columns, symmetric, g_idx)
    parts = {"weight_packed": words(codes), "weight_scale": scales.half(), "weight_shape": torch.tensor(weight.shape)}
    if not symmetric:
        parts["weight_zero_point"] = words(zeros.T).T
    if g_idx is not None:
        parts["weight_g_idx"] = g_idx.int()
    return parts, values


def gptq(weight: Tensor, version: int = 1, scattered: bool = False) -> Parts:
    g_idx = scattered_groups(weight.shape[1], 32) if scattered else None
    codes, scales, zeros, values = rounded(weight, 32, symmetric=False, g_idx=g_idx)
    return {
        "qweight": words(codes).T,
        "qzeros": words(zeros.T - (1 if version == 1 else 0)),
        "scales": scales.T.half(),
        "g_idx": torch.arange(weight.shape[1]).int() // 32 if g_idx is None else g_idx.int(),
    }, values


def awq(weight: Tensor) -> Parts:
    codes, scales, zeros, values = rounded(weight, 32, symmetric=False)
    return {
        "qweight": words(codes.T, AWQ_ORDER),
        "qzeros": words(zeros.T, AWQ_ORDER),
        "scales": scales.T.half(),
    }, values


def int8(weight: Tensor, group: int | None = None, in_words: bool = True) -> Parts:
    rows, columns = weight.shape
    group = group or columns
    groups = weight.view(rows, -1, group)
    scales = (groups.abs().amax(-1) / 127).half()
    codes = (groups / scales.float()[..., None]).round().clamp(-128, 127)
    values = (codes * scales.float()[..., None]).view(rows, columns)
    stored = codes.view(rows, columns).to(torch.int8)
    if not in_words:
        return {"weight": stored, "weight_scale": scales}, values
    packed = sum((stored[:, i::4].long() + 128) << (8 * i) for i in range(4))
    assert isinstance(packed, Tensor)
    return {
        "weight_packed": packed.where(packed < 2**31, packed - 2**32).int(),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }, values


def scattered_groups(columns: int, group: int) -> Tensor:
    """Return scattered groups that depend only on the number of columns: matrices with the same input have the same groups."""
    return (torch.arange(columns) // group)[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]


def fp8(
    weight: Tensor, block: tuple[int, int] | None = None, by_row: bool = False, name: str = "weight_scale"
) -> Parts:
    rows, columns = weight.shape
    height, width = block or ((1, columns) if by_row else (rows, columns))
    scales = torch.zeros(-(-rows // height), -(-columns // width))
    stored, values = torch.zeros(weight.shape).to(torch.float8_e4m3fn), torch.zeros_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
            scales[i, j] = weight[part].abs().amax() / 448
            stored[part] = (weight[part] / scales[i, j]).to(torch.float8_e4m3fn)
            values[part] = stored[part].float() * scales[i, j]
    return {"weight": stored, name: scales if block or by_row else scales.view(())}, values


def fp8_rounded(x: Tensor) -> Tensor:
    """Round activations as FP8 products do: with one scale for each row, or for every 128 columns if there are 192 or 320."""
    parts = x.split(128 if x.shape[-1] in (192, 320) else x.shape[-1], dim=-1)
    scales = [part.abs().amax(-1, keepdim=True) / 448 for part in parts]
    return torch.cat(
        [(part / scale).to(torch.float8_e4m3fn).float() * scale for part, scale in zip(parts, scales, strict=True)], -1
    )


def pack_quantized(**weights: Any) -> dict[str, Any]:
    """Return a quantization_config of compressed-tensors."""
    described = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True} | weights
    form = "pack-quantized" if described["type"] == "int" else "float-quantized"
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": described, "input_activations": None}},
    }  # fmt: skip

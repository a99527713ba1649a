"""A writer of GGUF files of models whose layers keep states, with the values that llama.cpp's converter would write (its conversion/qwen.py, lfm2.py,
mamba.py, granite.py, nemotron.py, falcon_h1.py, kimi_linear.py). Names of tensors come from llama.cpp's package `gguf`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel

from tests.checkpoints import write_checkpoint
from tests.engine.gguf.files import Kind, rounded_as

ARCHITECTURES = {
    "lfm2": gguf.MODEL_ARCH.LFM2, "lfm2_moe": gguf.MODEL_ARCH.LFM2MOE, "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35, "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID, "falcon_h1": gguf.MODEL_ARCH.FALCON_H1, "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "kimi_linear": gguf.MODEL_ARCH.KIMI_LINEAR,
}  # fmt: skip
_MIXERS = ("attention", "full_attention")
_FLOATS = re.compile(r"norm|conv1d|conv\.conv|ssm_[ad]$|bias|gate_inp")  # tensors that stay fp32


def write_states(
    folder: Path,
    config: PreTrainedConfig,
    kind: Kind = Kind.F32,
    changes: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] = lambda keys, tensors: None,
) -> tuple[PreTrainedModel, Path, Path]:
    """Write a random model as two GGUF files, and return the model and both.

    Matrices of the first file have the type `kind`, those of the second the same rounded values in fp32. `changes` gets the keys without the
    architecture's name, and the tensors.
    """
    model = write_checkpoint(folder / "checkpoint", config)
    described = config.to_dict()
    described |= {ours: described[theirs] for ours, theirs in config.attribute_map.items() if theirs in described}
    architecture = ARCHITECTURES[described["model_type"]]
    if described.get("n_routed_experts") and "moe" in described.get("layers_block_type", ()):
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    tensors = dict(_tensors(architecture, described, load_file(folder / "checkpoint" / "model.safetensors")))
    keys = _keys(described, tensors)
    changes(keys, tensors)
    files = folder / "coded.gguf", folder / "plain.gguf"
    for file, own in zip(files, (kind, Kind.F32), strict=True):
        writer = gguf.GGUFWriter(str(file), gguf.MODEL_ARCH_NAMES[architecture])
        for key, value in keys.items():
            add: Any = {
                bool: writer.add_bool,
                float: writer.add_float32,
                int: writer.add_uint32,
                list: writer.add_array,
            }
            add[type(value)](f"{writer.arch}.{key}", value)
        writer.add_tokenizer_model("no_vocab")
        for name, tensor in tensors.items():
            is_coded = tensor.ndim > 1 and not _FLOATS.search(name)
            values = rounded_as(tensor, kind) if is_coded and own is Kind.F32 else tensor
            of = own if is_coded else Kind.F32
            writer.add_tensor(name, gguf.quants.quantize(values.numpy(), of), raw_dtype=of)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return model, *files


def _keys(c: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    types = c.get("layers_block_type") or c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
    eps = c.get("rms_norm_eps") or c.get("norm_eps") or c["layer_norm_epsilon"]
    rope, kind = c.get("rope_parameters") or {"rope_theta": 10_000.0}, c["model_type"]
    keys: dict[str, Any] = {
        "block_count": len(types), "context_length": c["max_position_embeddings"], "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"], "attention.head_count": c["num_attention_heads"],
        "attention.head_count_kv": [c["num_key_value_heads"] * (one in _MIXERS) for one in types],
        "attention.layer_norm_rms_epsilon": eps, "rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    if c.get("head_dim"):
        keys |= {"attention.key_length": c["head_dim"], "attention.value_length": c["head_dim"]}
    if c.get("num_experts_per_tok"):
        count = next(c[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in c)
        keys |= {"expert_count": count, "expert_used_count": c["num_experts_per_tok"]}
    if c.get("moe_intermediate_size"):
        keys["expert_feed_forward_length"] = c["moe_intermediate_size"]
    if kind.startswith("lfm2"):
        keys |= {"shortconv.l_cache": c["conv_L_cache"], "feed_forward_length": len(tensors["blk.0.ffn_up.weight"])}
        if kind == "lfm2_moe":
            keys |= {"leading_dense_block_count": c["num_dense_layers"], "expert_gating_func": 2}
    if kind.startswith("qwen3"):
        heads, value = c["linear_num_value_heads"], c["linear_value_head_dim"]
        keys |= _ssm(
            c["linear_conv_kernel_dim"], c["linear_key_head_dim"], c["linear_num_key_heads"], heads, heads * value
        )
        keys |= {
            "attention.head_count_kv": c["num_key_value_heads"], "attention.recurrent_layers": [one not in _MIXERS for one in types],
            "rope.dimension_count": int(c["head_dim"] * rope["partial_rotary_factor"]),
        }  # fmt: skip
        if kind != "qwen3_next":
            keys["rope.dimension_sections"] = [11, 11, 10, 0]
    if c.get("shared_expert_intermediate_size"):
        keys["expert_shared_feed_forward_length"] = c["shared_expert_intermediate_size"]
    if "mamba_n_heads" in c:
        inner = c.get("mamba_d_ssm") or c["mamba_expand"] * c["hidden_size"]
        keys |= _ssm(c["mamba_d_conv"], c["mamba_d_state"], c["mamba_n_groups"], c["mamba_n_heads"], inner)
    if kind == "granitemoehybrid":
        keys |= {
            "attention.scale": c["attention_multiplier"], "embedding_scale": c["embedding_multiplier"],
            "residual_scale": c["residual_multiplier"], "logit_scale": c["logits_scaling"], "rope.scaling.finetuned": False,
            "expert_shared_feed_forward_length": c["shared_intermediate_size"],
        }  # fmt: skip
    if kind == "falcon_h1":
        keys["attention.head_count_kv"] = c["num_key_value_heads"]
    if kind == "kimi_linear":
        rotated = c["qk_rope_head_dim"]
        keys |= {
            "attention.head_count_kv": [int(one in _MIXERS) for one in types], "rope.dimension_count": rotated,
            "attention.kv_lora_rank": c["kv_lora_rank"], "attention.key_length": c["kv_lora_rank"] + rotated,
            "attention.key_length_mla": c["qk_nope_head_dim"] + rotated, "attention.value_length_mla": c["v_head_dim"],
            "kda.head_dim": c["linear_head_dim"], "ssm.conv_kernel": c["linear_conv_kernel_dim"], "expert_gating_func": 2,
            "expert_shared_count": c["n_shared_experts"], "expert_weights_scale": c["routed_scaling_factor"],
            "leading_dense_block_count": c["mlp_layer_types"].count("dense"), "expert_group_used_count": c["topk_group"],
            **({"attention.q_lora_rank": c["q_lora_rank"]} if c["q_lora_rank"] else {}),
        }  # fmt: skip
    if kind == "nemotron_h":
        del keys["attention.layer_norm_rms_epsilon"]
        heads, own = c["mamba_num_heads"], "moe" in types
        size = c["moe_intermediate_size" if own else "intermediate_size"]
        keys |= _ssm(c["conv_kernel"], c["ssm_state_size"], c["n_groups"], heads, heads * c["mamba_head_dim"])
        keys |= {
            "attention.layer_norm_epsilon": eps,
            "rope.dimension_count": c["hidden_size"] // c["num_attention_heads"],
        }
        keys["feed_forward_length"] = [size * (one in ("moe", "mlp")) for one in types]
        if own:
            keys |= {
                "expert_shared_feed_forward_length": c["moe_shared_expert_intermediate_size"], "expert_group_count": c["n_group"],
                "expert_group_used_count": c["topk_group"], "expert_weights_norm": c["norm_topk_prob"],
                "expert_weights_scale": c["routed_scaling_factor"], "moe_latent_size": c["moe_latent_size"],
            }  # fmt: skip
        else:
            del keys["expert_count"], keys["expert_used_count"], keys["expert_feed_forward_length"]
    return keys


def _ssm(kernel: int, state: int, groups: int, heads: int, inner: int) -> dict[str, int]:
    return {
        "ssm.conv_kernel": kernel, "ssm.state_size": state, "ssm.group_count": groups, "ssm.time_step_rank": heads, "ssm.inner_size": inner,
    }  # fmt: skip


def _tensors(
    architecture: gguf.MODEL_ARCH, c: dict[str, Any], stored: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors by their names in a GGUF file."""
    names = gguf.get_tensor_name_map(architecture, 9)
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(stored, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
        for part, tensor in _divided(name, stored[name], c):
            stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.", part), []).append(tensor)
    for name, of in stacks.items():
        values = of[0] if len(of) == 1 else torch.stack(of)
        found = names.get_name(_known(name), try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        yield found, _as_converted(name, values, c).float().contiguous()


def _known(name: str) -> str:
    """Return the name that the package knows."""
    name = name.replace("dt_bias", "dt_proj.bias").replace("expert_bias", "expert_bias.bias")
    name = name.replace("_correction_bias", "_correction.bias").replace("feed_forward.experts", "mlp.experts")
    name = re.sub(r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp.", name)
    name = re.sub(
        r"(block_sparse_moe\.experts|mlp\.experts)\.w([123])", lambda found: f"mlp.experts.{_W[found[2]]}", name
    )
    if ".mixer.experts" in name:
        return name.replace("mixer.experts", "mlp.experts").replace("backbone", "model")
    return re.sub(r"^model\.(?=layers\.\d+\.mixer|embeddings|norm_f)", "backbone.", name)


_W = {"1": "gate_proj", "2": "down_proj", "3": "up_proj"}


def _divided(name: str, tensor: torch.Tensor, c: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parts that files have as separate tensors."""
    if name.endswith("in_proj_qkvz.weight"):
        key, value = (
            c["linear_key_head_dim"],
            c["linear_num_value_heads"] // c["linear_num_key_heads"] * c["linear_value_head_dim"],
        )
        q, k, v, z = tensor.unflatten(0, (c["linear_num_key_heads"], -1)).split([key, key, value, value], 1)
        yield name.replace("qkvz", "qkv"), torch.cat([part.flatten(0, 1) for part in (q, k, v)])
        yield name.replace("qkvz", "z"), z.flatten(0, 1)
    elif name.endswith("input_linear.weight"):
        stem = name.removesuffix("input_linear.weight")
        stem = stem.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", _shared(c))
        for part, values in zip(("gate", "up"), tensor.chunk(2, -2), strict=True):
            yield f"{stem}{part}_proj.weight", values
    elif name.endswith("kv_b_proj.weight"):
        heads = tensor.unflatten(0, (c["num_attention_heads"], -1))
        keys, values = heads.split([c["qk_nope_head_dim"], c["v_head_dim"]], dim=1)
        yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
        yield name.replace("kv_b", "v_b"), values
    elif name.endswith("output_linear.weight"):
        name = name.replace("shared_mlp", _shared(c)).replace("output_linear", "down_proj")
        yield name.replace("block_sparse_moe", "mlp.experts"), tensor
    else:
        yield name, tensor


def _shared(c: dict[str, Any]) -> str:
    """Return the name of Granite 4's dense feed-forward, beside experts or alone."""
    return "mlp.shared_expert" if c["num_local_experts"] else "mlp"


def _as_converted(name: str, tensor: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    kind, part = c["model_type"], name.split(".")[-2]
    if kind.startswith("qwen3"):
        if (name.endswith("norm.weight") and part != "norm") or name == "model.norm.weight":
            tensor = tensor + 1
        if kind != "qwen3_next" and "linear_attn" in name:
            tensor = _tiled(name, tensor, c)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    if kind == "kimi_linear":
        return tensor.reshape(1, len(tensor), 1, -1) if name.endswith("conv1d.weight") else tensor
    if name.endswith(("conv1d.weight", "conv.conv.weight")):
        return tensor.squeeze(1)
    if kind == "falcon_h1":
        tensor = _scaled(name, part, tensor, c)
    if not kind.startswith("qwen3"):
        if name.endswith(("A_log", ".D")):
            tensor = tensor.unsqueeze(-1)
        if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            tensor = tensor.unflatten(0, (c.get("mamba_n_groups") or c["n_groups"], -1))
    if kind in ("granitemoehybrid", "nemotron_h") and part in ("q_proj", "k_proj"):
        heads = c["num_attention_heads" if part == "q_proj" else "num_key_value_heads"]
        tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return tensor[0] if part == "shared_expert_gate" else tensor


def _tiled(name: str, tensor: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """Reorder the value heads: first one of each key head, then the next of each."""
    groups, of_keys = c["linear_num_key_heads"], 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"]
    dim = int("out_proj" in name)

    def reordered(values: torch.Tensor) -> torch.Tensor:
        of_key = c["linear_num_value_heads"] // groups
        return values.unflatten(dim, (groups, of_key, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)

    if "in_proj_qkv" in name or "conv1d" in name:
        return torch.cat((tensor[:of_keys], reordered(tensor[of_keys:])))
    return tensor if name.endswith("linear_attn.norm.weight") else reordered(tensor)


def _scaled(name: str, part: str, tensor: torch.Tensor, c: dict[str, Any]) -> torch.Tensor:
    """Multiply a tensor of Falcon-H1 by its multipliers."""
    if part == "in_proj" and name.endswith("weight"):
        inner, group = c["mamba_d_ssm"], c["mamba_n_groups"] * c["mamba_d_state"]
        parts = tensor.split([inner, inner, group, group, c["mamba_n_heads"]])
        return (
            torch.cat([x * scale for x, scale in zip(parts, c["ssm_multipliers"], strict=True)])
            * c["ssm_in_multiplier"]
        )
    key, seen = c["key_multiplier"], c["attention_in_multiplier"]
    gate, down = c["mlp_multipliers"]
    scales = {
        "q_proj": seen, "k_proj": seen * key, "v_proj": seen, "o_proj": c["attention_out_multiplier"], "out_proj": c["ssm_out_multiplier"],
        "gate_proj": gate, "down_proj": down, "lm_head": c["lm_head_multiplier"], "embed_tokens": c["embedding_multiplier"],
    }  # fmt: skip
    return tensor * scales.get(part, 1.0)

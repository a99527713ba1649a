"""Converts a GGUF file's metadata to a config.json, and its tensors' names to those of a checkpoint.

Names and keys are from llama.cpp's gguf-py/gguf/constants.py and tensor_mapping.py; how its converter changes values is from conversion/llama.py and
gemma.py (https://github.com/ggml-org/llama.cpp). Refuses unsupported families, unknown tensors and unknown rotary keys.
"""

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.file import GgufFile, GgufTensor
from pilotlight.engine.gguf.metadata import Metadata

_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYERS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_GEMMA_LAYERS = _LAYERS | {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_MIXTRAL_LAYERS = _LAYERS | {
    "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3", "ffn_down_exps": "block_sparse_moe.experts.w2",
}  # fmt: skip
_QWEN2_MOE_LAYERS = _LAYERS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_GRANITE_MOE_LAYERS = _LAYERS | {
    "ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_gate_exps": "block_sparse_moe.experts.gate_proj",
    "ffn_up_exps": "block_sparse_moe.experts.up_proj", "ffn_down_exps": "block_sparse_moe.experts.down_proj",
}  # fmt: skip
_MINIMAX_LAYERS = _MIXTRAL_LAYERS | {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_SHARED_LAYERS = _LAYERS | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
_ERNIE_MOE_LAYERS = _SHARED_LAYERS | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"}
_GLM_MOE_LAYERS = _SHARED_LAYERS | {
    "exp_probs_b": "mlp.gate.e_score_correction_bias", "post_attention_norm": "post_attention_layernorm",
}  # fmt: skip
_GLM_LAYERS = _LAYERS | {
    "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm", "ffn_up": "mlp.gate_up_proj",
}  # fmt: skip
_PHI_LAYERS = _LAYERS | {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_OLMO_LAYERS = _LAYERS | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TURNED = ("self_attn.q_proj", "self_attn.k_proj")
_ROPE_KEYS = (
    "dimension_count",
    "freq_base",
    "freq_base_swa",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
)
# Meta's parameters for Llama 3. GGUF files only contain the resulting factor for each pair of dimensions.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class NamedTensor(NamedTuple):
    """A tensor of a file, or one expert's part of it, with its name in a checkpoint."""

    name: str
    tensor: GgufTensor
    # rows of queries or keys in the order of llama.cpp: rotated pairs are adjacent; in a checkpoint they are half a head apart
    is_turned: bool = False


class Described(NamedTuple):
    config: dict[str, Any]
    tensors: list[NamedTensor]


class _Family(NamedTuple):
    architecture: str
    configure: Callable[[Metadata], dict[str, Any]]
    layers: Mapping[str, str] = _LAYERS
    is_turned: bool = False
    may_turn_a_part: bool = False  # of each head
    may_have_biases: bool = False


def describe(file: GgufFile) -> Described:
    """Return the file's config and named tensors. Raises CheckpointError."""
    metadata = Metadata(file.metadata, file.path.name)
    family = READ.get(_variant(metadata))
    if family is None:
        raise CheckpointError(
            f"{file.path.name} is of the architecture {metadata.architecture!r}; for GGUF files, supported are {', '.join(READ)}"
        )
    if metadata.integer("split.count", 1) > 1:
        raise CheckpointError(f"{file.path.name} is a part of several; join them first: llama-gguf-split --merge")
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path.name} lacks the tensor token_embd.weight")
    config = {"architectures": [family.architecture], **_shared(metadata, file, family), **family.configure(metadata)}
    unused = range(config["num_hidden_layers"], metadata.integer("{arch}.block_count"))
    return Described(config, list(_named(file, family, unused)))


def _variant(metadata: Metadata) -> str:
    """Return the name in READ of a file's architecture, which may have one name for two families."""
    name = metadata.architecture
    key, suffix = _VARIANTS.get(name, ("", ""))
    return f"{name} {suffix}" if key and metadata.integer(f"{name}.{key}", 0) else name


def _shared(metadata: Metadata, file: GgufFile, family: _Family) -> dict[str, Any]:
    hidden, heads = metadata.integer("{arch}.embedding_length"), metadata.integer("{arch}.attention.head_count")
    if not heads:
        raise CheckpointError(f"{metadata.origin} has no attention heads")
    plain = hidden // heads
    if not family.may_turn_a_part:
        plain = metadata.integer("{arch}.rope.dimension_count", plain)
    head_dim = metadata.integer("{arch}.attention.key_length", plain)
    turned = metadata.integer("{arch}.rope.dimension_count", head_dim)
    for key in ("{arch}.attention.value_length", *(() if family.may_turn_a_part else ("{arch}.rope.dimension_count",))):
        if metadata.integer(key, head_dim) != head_dim:
            raise CheckpointError(
                f"{metadata.origin} has {metadata.integer(key)} as {key.replace('{arch}', metadata.architecture)} and heads of {head_dim}; "
                "they must be equal"
            )
    theta = metadata.number("{arch}.rope.freq_base", 10_000.0)
    rope = _rope(metadata, file, head_dim, theta)
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": metadata.integer("{arch}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.integer("{arch}.context_length"),
        "rms_norm_eps": metadata.number("{arch}.attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        **({"rope_scaling": rope} if rope else {}),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **({"partial_rotary_factor": turned / head_dim} if family.may_turn_a_part else {}),
        **({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if family.may_have_biases else {}),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,  # read by GLM-4.5, which may lack these norms
    }


def _rope(metadata: Metadata, file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    for key in metadata.keys("{arch}.rope."):
        if key.split(".rope.", 1)[1] not in _ROPE_KEYS:
            raise CheckpointError(f"{metadata.origin} has the rotary key {key}, which is not known here")
    local = metadata.number("{arch}.rope.freq_base_swa", theta)
    if local != theta and metadata.architecture != "gemma3":
        raise CheckpointError(
            f"{metadata.origin} rotates layers with windows by the base {local}; supported for {metadata.architecture} is that of all, {theta}"
        )
    kind = metadata.text("{arch}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rule: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("{arch}.rope.scaling.factor")}
        if kind == "yarn":
            rule["original_max_position_embeddings"] = metadata.integer("{arch}.rope.scaling.original_context_length")
        return rule
    if kind != "none":
        raise CheckpointError(f"{metadata.origin} has the rotary scaling {kind!r}; supported are linear, yarn and none")
    factors = file.tensors.get(f"{_ROPE_FACTORS}.weight")
    return None if factors is None else _llama3_rule(file.floats(factors), file.path.name, head_dim, theta)


def _llama3_rule(factors: Sequence[float], origin: str, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the rotary scaling of Llama 3 with these factors. Raises CheckpointError for other factors."""
    rule = {"rope_type": "llama3", "factor": max(factors), **_LLAMA3}
    low, high, length = (
        _LLAMA3[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    expected = []
    for i in range(0, head_dim, 2):
        turns = length * theta ** (-i / head_dim) / (2 * math.pi)  # full turns of the pair within the trained length
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        expected.append(1 / ((1 - share) / rule["factor"] + share))
    if len(factors) != len(expected) or not all(
        math.isclose(*pair, rel_tol=1e-3) for pair in zip(factors, expected, strict=True)
    ):
        raise CheckpointError(
            f"{origin} scales rotary frequencies by {_ROPE_FACTORS}.weight in another way than Llama 3's"
        )
    return rule


def _dense(metadata: Metadata) -> dict[str, Any]:
    return {"intermediate_size": metadata.integer("{arch}.feed_forward_length")}


def _experts(metadata: Metadata) -> dict[str, Any]:
    """Return the config of families whose experts have no further keys.

    The weights of chosen experts are not normalised, as in llama.cpp.
    """
    count = metadata.integer("{arch}.expert_count")
    return {
        "intermediate_size": metadata.integer("{arch}.feed_forward_length"),
        "num_experts": count,
        "num_local_experts": count,  # Mixtral's key
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "norm_topk_prob": False,
    }


def _qwen2_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **_experts(metadata),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "shared_expert_intermediate_size": metadata.integer("{arch}.expert_shared_feed_forward_length"),
    }


def _windows(metadata: Metadata) -> dict[str, Any]:
    """Return the config of a dense family in which some layers may have windows.

    They are three of four layers, unless the file has a list.
    """
    window, key = metadata.integer("{arch}.attention.sliding_window", 0), "{arch}.attention.sliding_window_pattern"
    kinds = ("full_attention", "sliding_attention")
    listed = {"layer_types": [kinds[has_window] for has_window in metadata.flags(key)]} if key in metadata else {}
    return {**_dense(metadata), "sliding_window": window or None, **(listed if window else {})}


def _qwen3_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        "intermediate_size": metadata.integer(
            "{arch}.feed_forward_length", metadata.integer("{arch}.expert_feed_forward_length")
        ),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "num_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "norm_topk_prob": True,  # as always in llama.cpp
    }


def _gemma3(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 3, in which every sixth layer has full attention.

    The largest model (62 layers) scales scores by hidden size / heads, not by the head size. Files do not contain this; llama.cpp infers it as well.
    """
    for key in ("{arch}.attn_logit_softcapping", "{arch}.final_logit_softcapping"):
        if key in metadata and metadata.number(key):
            raise CheckpointError(f"{metadata.origin} caps its logits, which is not supported here")
    heads, head_dim = metadata.integer("{arch}.attention.head_count"), metadata.integer("{arch}.attention.key_length")
    is_largest = metadata.integer("{arch}.block_count") == 62
    return {
        "intermediate_size": metadata.integer("{arch}.feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": metadata.integer("{arch}.embedding_length") // heads if is_largest else head_dim,
        "sliding_window": metadata.integer("{arch}.attention.sliding_window"),
        "sliding_window_pattern": 6,
        "rope_local_base_freq": metadata.number("{arch}.rope.freq_base_swa", 10_000.0),
        "norm_offset_included": True,
    }


def _gemma2(metadata: Metadata) -> dict[str, Any]:
    """Return the config of Gemma 2, in which every second layer has full attention.

    The largest model (46 layers) scales scores by hidden size / heads, not by the head size, as in llama.cpp.
    """
    heads, head_dim = metadata.integer("{arch}.attention.head_count"), metadata.integer("{arch}.attention.key_length")
    is_largest = metadata.integer("{arch}.block_count") == 46
    return {
        "intermediate_size": metadata.integer("{arch}.feed_forward_length"),
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": metadata.integer("{arch}.embedding_length") // heads if is_largest else head_dim,
        "sliding_window": metadata.integer("{arch}.attention.sliding_window"),
        "attn_logit_softcapping": metadata.number("{arch}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("{arch}.final_logit_softcapping", 30.0),
        "norm_offset_included": True,
    }


def _granite(metadata: Metadata) -> dict[str, Any]:
    return {
        **_dense(metadata),
        "attention_multiplier": metadata.number("{arch}.attention.scale"),
        "embedding_multiplier": metadata.number("{arch}.embedding_scale"),
        "residual_multiplier": metadata.number("{arch}.residual_scale"),
        "logits_scaling": metadata.number("{arch}.logit_scale"),
    }


def _granite_moe(metadata: Metadata) -> dict[str, Any]:
    return {**_experts(metadata), **_granite(metadata)}


def _minimax(metadata: Metadata) -> dict[str, Any]:
    return {**_experts(metadata), "intermediate_size": metadata.integer("{arch}.expert_feed_forward_length")}


def _ernie_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **_dense(metadata),
        "moe_num_experts": metadata.integer("{arch}.expert_count"),
        "moe_k": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "moe_num_shared_experts": metadata.integer("{arch}.expert_shared_count", 0),
        "moe_layer_interval": metadata.integer("{arch}.interleave_moe_layer_step", 1),
        "moe_layer_start_index": metadata.integer("{arch}.leading_dense_block_count", 0),
    }


def _glm_moe(metadata: Metadata) -> dict[str, Any]:
    """Return the config of GLM-4.5, 4.6 and 4.7.

    Files count the layers that predict further tokens as blocks; these layers are not used.
    """
    further = metadata.integer("{arch}.nextn_predict_layers", 0)
    return {
        **_dense(metadata),
        "num_hidden_layers": metadata.integer("{arch}.block_count") - further,
        "n_routed_experts": metadata.integer("{arch}.expert_count"),
        "num_experts_per_tok": metadata.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": metadata.integer("{arch}.expert_feed_forward_length"),
        "n_shared_experts": metadata.integer("{arch}.expert_shared_count", 0),
        "first_k_dense_replace": metadata.integer("{arch}.leading_dense_block_count", 0),
        "routed_scaling_factor": metadata.number("{arch}.expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag("{arch}.expert_weights_norm", True),
    }


def _phi3(metadata: Metadata) -> dict[str, Any]:
    return {**_dense(metadata), "sliding_window": metadata.integer("{arch}.attention.sliding_window", 0) or None}


def _smollm3(metadata: Metadata) -> dict[str, Any]:
    return {**_dense(metadata), "no_rope_layer_interval": 4}  # a constant of llama.cpp, which files do not contain


READ = {
    "llama": _Family("LlamaForCausalLM", _dense, is_turned=True),
    "qwen2": _Family("Qwen2ForCausalLM", _dense),
    "qwen3": _Family("Qwen3ForCausalLM", _dense),
    "qwen3moe": _Family("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": _Family("Gemma2ForCausalLM", _gemma2, _GEMMA_LAYERS),
    "granite": _Family("GraniteForCausalLM", _granite, is_turned=True),
    "olmo2": _Family("Olmo2ForCausalLM", _dense, _OLMO_LAYERS),
    "phi3": _Family("Phi3ForCausalLM", _phi3, _PHI_LAYERS),
    "smollm3": _Family("SmolLM3ForCausalLM", _smollm3, is_turned=True),
    "gemma3": _Family("Gemma3ForCausalLM", _gemma3, _GEMMA_LAYERS),
    "llama with experts": _Family("MixtralForCausalLM", _experts, _MIXTRAL_LAYERS, is_turned=True),
    "olmo2 with windows": _Family("Olmo3ForCausalLM", _windows, _OLMO_LAYERS),
    "olmoe": _Family("OlmoeForCausalLM", _experts),
    "qwen2moe": _Family("Qwen2MoeForCausalLM", _qwen2_moe, _QWEN2_MOE_LAYERS),
    "exaone4": _Family("Exaone4ForCausalLM", _windows, _OLMO_LAYERS),
    "ernie4_5": _Family("Ernie4_5ForCausalLM", _dense),
    "seed_oss": _Family("SeedOssForCausalLM", _dense, _OLMO_LAYERS, may_have_biases=True),
    "glm4": _Family("Glm4ForCausalLM", _dense, _GLM_LAYERS, may_turn_a_part=True, may_have_biases=True),
    "granitemoe": _Family("GraniteMoeForCausalLM", _granite_moe, _GRANITE_MOE_LAYERS, is_turned=True),
    "minimax-m2": _Family("MiniMaxM2ForCausalLM", _minimax, _MINIMAX_LAYERS, may_turn_a_part=True),
    "glm4moe": _Family("Glm4MoeForCausalLM", _glm_moe, _GLM_MOE_LAYERS, may_turn_a_part=True, may_have_biases=True),
    "ernie4_5-moe": _Family("Ernie4_5_MoeForCausalLM", _ernie_moe, _ERNIE_MOE_LAYERS),
}
# Architectures that mean another family if a key of the metadata is not zero.
_VARIANTS = {"llama": ("expert_count", "with experts"), "olmo2": ("attention.sliding_window", "with windows")}


def _named(file: GgufFile, family: _Family, unused: Container[int]) -> Iterator[NamedTensor]:
    """Name the tensors, except those of the layers `unused`.

    Raises CheckpointError for tensors that the family does not have.
    """
    for stored in file.tensors.values():
        stem, _, part = stored.name.rpartition(".")
        if stem == _ROPE_FACTORS:
            continue
        if stem in _OUTER and part == "weight":
            yield NamedTensor(f"{_OUTER[stem]}.weight", stored)
            continue
        found = _LAYER.fullmatch(stored.name)
        if found is not None and int(found[1]) in unused:
            continue
        name = None if found is None else family.layers.get(found[2])
        if found is None or name is None or (family.is_turned and part == "bias"):
            raise CheckpointError(f"{file.path.name} has the tensor {stored.name}, which no {family.architecture} has")
        whole = f"model.layers.{found[1]}.{name}" + ("" if name.endswith("_bias") else f".{part}")
        if name == "mlp.shared_expert_gate":  # files have this row as a vector
            stored = stored._replace(shape=(1, stored.shape[-1]))
        if ".experts." not in name:
            yield NamedTensor(whole, stored, family.is_turned and name in _TURNED)
            continue
        if len(stored.shape) != 3:
            raise CheckpointError(
                f"tensor {stored.name} in {file.path.name} has shape {list(stored.shape)}; experts' have three"
            )
        num_bytes = (stored.end - stored.start) // stored.shape[0]
        for i in range(stored.shape[0]):
            start = stored.start + i * num_bytes
            one = stored._replace(shape=stored.shape[1:], start=start, end=start + num_bytes)
            yield NamedTensor(whole.replace(".experts.", f".experts.{i}."), one)

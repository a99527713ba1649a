"""A family of models in GGUF files: the names of its tensors, and what all families share.

Names and keys are from llama.cpp's gguf-py/gguf/constants.py and tensor_mapping.py; how its converter changes values is from its folder conversion
(https://github.com/ggml-org/llama.cpp).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.file import GgufFile, GgufTensor
from pilotlight.engine.gguf.metadata import Metadata
from pilotlight.engine.weights.config import MOST_LAYERS

ROPE_FACTORS = "rope_freqs"
LAYERS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
SHARED_LAYERS = LAYERS | {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}  # fmt: skip
YARN_WEIGHT = "scaling.yarn_log_multiplier"
_ROPE_KEYS = (
    "dimension_count",
    "freq_base",
    "freq_base_swa",
    "scaling.type",
    "scaling.factor",
    "scaling.original_context_length",
    "scaling.finetuned",
    "scaling.yarn_beta_fast",
    "scaling.yarn_beta_slow",
)
# Keys that change what a model computes, with the values that have no effect. A family that does not read such a key is refused with another value.
_DECISIVE: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,), "attention.scale": (0,), "attention.shared_kv_layers": (0,), "attention.temperature_scale": (0,),
    "attention.value_scale": (0, 1), "attn_logit_softcapping": (0,), "embedding_length_per_layer_input": (0,), "embedding_scale": (0, 1),
    "expert_group_count": (0, 1), "expert_weights_scale": (0, 1), "final_logit_softcapping": (0,), "logit_scale": (0, 1),
    "residual_scale": (0, 1),
}  # fmt: skip


class GgufHeader(Metadata):
    """The metadata of a file, and its tensors."""

    def __init__(self, file: GgufFile) -> None:
        super().__init__(file.metadata, file.path.name)
        self.file = file

    def has(self, tensor: str) -> bool:
        return tensor in self.file.tensors

    def require_equal(self, key: str, head_dim: int) -> None:
        """Raise CheckpointError if the file has another number than the size of heads."""
        if (found := self.integer(key, head_dim)) != head_dim:
            raise CheckpointError(
                f"{self.origin} has {found} as {key.replace('{arch}', self.architecture)} and heads of {head_dim}; they must be equal"
            )


class NamedTensor(NamedTuple):
    """A tensor of a file, or one expert's part of it, with its name in a checkpoint."""

    name: str
    tensor: GgufTensor  # its shape is that of the checkpoint
    # rows of queries or keys in the order of llama.cpp: rotated pairs are adjacent; in a checkpoint they are half a head apart
    is_turned: bool = False
    content: bytes | None = None  # the tensor's bytes if they differ from those in the file


def unchanged(header: GgufHeader, named: NamedTensor) -> Iterator[NamedTensor]:
    yield named


class GgufFamily(NamedTuple):
    architecture: str
    # Returns the config's keys that other families do not have. Those under rope_scaling are added to what `rotary` returns.
    configure: Callable[[GgufHeader], dict[str, Any]]
    layers: Mapping[str, str] = LAYERS
    is_turned: bool = False
    may_turn_a_part: bool = False  # of each head
    may_have_biases: bool = False
    # Heads differ between layers or have several parts, and `configure` returns their sizes.
    has_own_heads: bool = False
    rope_keys: tuple[str, ...] = ()  # rotary keys that other families do not have
    has_states: bool = False  # layers with a state count as layers without key-value heads
    prefix: str = "model.layers."  # of the names of a layer's tensors
    # Names of tensors outside layers that other families do not have; empty for tensors that are no part of the model's checkpoint.
    outer: Mapping[str, str] = {}
    convert: Callable[[GgufHeader, NamedTensor], Iterator[NamedTensor]] = unchanged  # makes a checkpoint's tensors


def config_of(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    """Return the file's config.json. Raises CheckpointError."""
    for key in header.keys("{arch}.rope."):
        if key.split(".rope.", 1)[1] not in _ROPE_KEYS + family.rope_keys:
            raise CheckpointError(f"{header.origin} has the rotary key {key}, which is not known here")
    shared, own = _shared(header, family), family.configure(header)
    rope = shared.pop("rope_scaling", {}) | own.pop("rope_scaling", {})
    for key, harmless in _DECISIVE.items():
        value = header.unread("{arch}." + key)
        if value is not None and value not in harmless:
            raise CheckpointError(
                f"{header.origin} has {header.architecture}.{key} = {value!r}, which is not supported for {family.architecture}"
            )
    return {"architectures": [family.architecture], **shared, **({"rope_scaling": rope} if rope else {}), **own}


def _shared(header: GgufHeader, family: GgufFamily) -> dict[str, Any]:
    heads = header.positive("{arch}.attention.head_count")
    sizes = {} if family.has_own_heads else _heads(header, family, heads)
    return {
        "vocab_size": header.file.tensors["token_embd.weight"].shape[0],
        "hidden_size": header.integer("{arch}.embedding_length"),
        "num_hidden_layers": num_layers(header),
        "num_attention_heads": heads,
        **sizes,
        "max_position_embeddings": header.integer("{arch}.context_length"),
        "rms_norm_eps": norm_eps(header),
        **rotary(header, family, sizes.get("head_dim", 0)),
        "tie_word_embeddings": not header.has("output.weight"),
        **({"attention_bias": _has_biases(header)} if family.may_have_biases else {}),
        "use_qk_norm": header.has("blk.0.attn_q_norm.weight"),  # read by GLM-4.5, which may lack these norms
    }


def _has_biases(header: GgufHeader) -> bool:
    return header.has("blk.0.attn_q.bias") or header.has("blk.0.attn_qkv.bias")


def norm_eps(header: GgufHeader) -> float:
    """Return the epsilon of norms. Files of encoders and of Nemotron-H have it under LayerNorm's key."""
    keys = ("{arch}.attention.layer_norm_rms_epsilon", "{arch}.attention.layer_norm_epsilon")
    return header.number(next((key for key in keys if key in header), keys[0]))


def num_layers(header: GgufHeader) -> int:
    """Return the number of layers, without those that predict further tokens. Raises CheckpointError."""
    count = header.integer("{arch}.block_count")
    if count > MOST_LAYERS:
        raise CheckpointError(
            f"{header.origin} has {header.architecture}.block_count = {count}; it may be {MOST_LAYERS} at most"
        )
    return count - header.integer("{arch}.nextn_predict_layers", 0)


def _heads(header: GgufHeader, family: GgufFamily, heads: int) -> dict[str, Any]:
    plain = header.integer("{arch}.embedding_length") // heads
    if not family.may_turn_a_part:
        plain = header.integer("{arch}.rope.dimension_count", plain)
    head_dim = header.positive("{arch}.attention.key_length", plain)
    turned = header.integer("{arch}.rope.dimension_count", head_dim)
    header.require_equal("{arch}.attention.value_length", head_dim)
    if not family.may_turn_a_part:
        header.require_equal("{arch}.rope.dimension_count", head_dim)
    return {
        "num_key_value_heads": header.integer("{arch}.attention.head_count_kv", heads, family.has_states),
        "head_dim": head_dim,
        **({"partial_rotary_factor": turned / head_dim} if family.may_turn_a_part else {}),
    }


def rotary(header: GgufHeader, family: GgufFamily, head_dim: int) -> dict[str, Any]:
    """Return the base and the rule of rotation, for heads of `head_dim`."""
    theta = header.number("{arch}.rope.freq_base", 10_000.0)
    local = header.number("{arch}.rope.freq_base_swa", theta)
    if local != theta and "freq_base_swa" not in family.rope_keys:
        raise CheckpointError(
            f"{header.origin} rotates layers with windows by the base {local}; supported for {header.architecture} is that of all, {theta}"
        )
    kind = header.text("{arch}.rope.scaling.type", "none")
    if kind not in ("linear", "yarn", "none"):
        raise CheckpointError(f"{header.origin} has the rotary scaling {kind!r}; supported are linear, yarn and none")
    if kind == "none":
        return {"rope_theta": theta, "rope_scaling": rule_of_factors(header, head_dim, theta)}
    rule: dict[str, Any] = {"rope_type": kind, "factor": header.number("{arch}.rope.scaling.factor")}
    if kind == "yarn":
        rule["original_max_position_embeddings"] = header.integer("{arch}.rope.scaling.original_context_length")
        betas = {key: f"{{arch}}.rope.scaling.yarn_{key}" for key in ("beta_fast", "beta_slow")}
        rule |= {key: header.number(name) for key, name in betas.items() if name in header}
    return {"rope_theta": theta, "rope_scaling": rule}


def yarn_weights(header: GgufHeader, stored_share: float = 1.0) -> dict[str, float]:
    """Return YaRN's two weights, which are equal in published models.

    Files have one of them, times `stored_share`.
    """
    weight = header.number("{arch}.rope." + YARN_WEIGHT, 0.0) / stored_share
    return {"mscale": weight, "mscale_all_dim": weight} if weight else {}


# Meta's parameters for Llama 3 and 4. GGUF files only contain the resulting factor for each pair of dimensions.
_LLAMA3 = [
    {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": 8192} for high in (4.0, 1.0)
]
_STILL = 1e29  # factors of pairs that are not rotated are larger


def rule_of_factors(header: GgufHeader, head_dim: int, theta: float) -> dict[str, Any]:
    """Return the rotary scaling with the factors in the file; empty without factors.

    Raises CheckpointError if no supported scaling has these factors.
    """
    stored = header.file.tensors.get(f"{ROPE_FACTORS}.weight")
    if stored is None:
        return {}
    factors = header.file.floats(stored)
    turning = factors.count(1.0)
    if turning and min(factors[turning:], default=0.0) > _STILL:
        return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}
    is_sound = theta > 0 and len(factors) == -(-head_dim // 2) and all(0 < factor < _STILL for factor in factors)
    for values in _LLAMA3 if is_sound else ():
        rule = {"rope_type": "llama3", "factor": max(factors), **values}
        expected = _llama3_factors(rule, head_dim, theta)
        if all(map(_is_close, factors, expected)):
            return rule
    raise CheckpointError(
        f"{header.origin} scales rotary frequencies by {ROPE_FACTORS}.weight in another way than Llama 3's"
    )


def _is_close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-3)


def _llama3_factors(rule: Mapping[str, Any], head_dim: int, theta: float) -> Sequence[float]:
    low, high, length = (rule[key] for key in _LLAMA3[0])
    found = []
    for i in range(0, head_dim, 2):
        turns = length * theta ** (-i / head_dim) / (2 * math.pi)  # full turns of the pair within the trained length
        share = min(1.0, max(0.0, (turns - low) / (high - low))) if high > low else float(turns > high)
        found.append(1 / ((1 - share) / rule["factor"] + share))
    return found


def routed_experts(header: GgufHeader, renormalise: bool) -> dict[str, Any]:
    """Return the keys of experts with DeepSeek's names. `renormalise`: default of a file without the key."""
    return {
        "intermediate_size": header.integer("{arch}.feed_forward_length"),
        "n_routed_experts": header.integer("{arch}.expert_count"),
        "num_experts_per_tok": header.integer("{arch}.expert_used_count"),
        "moe_intermediate_size": header.integer("{arch}.expert_feed_forward_length"),
        "n_shared_experts": header.integer("{arch}.expert_shared_count", 0),
        "first_k_dense_replace": header.integer("{arch}.leading_dense_block_count", 0),
        "n_group": header.integer("{arch}.expert_group_count", 1),
        "topk_group": header.integer("{arch}.expert_group_used_count", 1),
        "routed_scaling_factor": header.number("{arch}.expert_weights_scale", 1.0),
        "norm_topk_prob": header.flag("{arch}.expert_weights_norm", renormalise),
    }

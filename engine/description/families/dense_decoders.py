"""The families of dense decoders.

Each function parses the config.json of one family, with the defaults of transformers. A family is a function here, and a row of config_registry.py.
Families differ in the fields of DenseConfig.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import (
    LayerKind,
    every_nth,
    mixed_layers,
    rules_by_type,
    sliding_window,
    text_keys,
    uniform_layers,
)
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.rotary_scaling import read_rotary_rule, rotary_parameters
from pilotlight.engine.description.shapes import NORMS_BEFORE, NormNames
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, refuse_unless
from pilotlight.engine.weights.fused import FusedRows

_BEHIND = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_AROUND_IN_GLM = NormNames(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)
# Defaults of a family for keys under text_config that a config.json may omit.
_MINISTRAL3 = {
    "sliding_window": None, "rms_norm_eps": 1e-5, "head_dim": 128,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    },
}  # fmt: skip
_GEMMA3 = {
    "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip


def llama(config: Mapping[str, Any], **own: Any) -> DenseConfig:
    """Llama 2 and 3. Other families pass the fields in which they differ as `own`."""
    bias = flag(config, "attention_bias", False)
    fields = {"qkv_bias": bias, "o_bias": bias, "mlp_bias": flag(config, "mlp_bias", False)}
    return DenseConfig.read(config, intermediate_size=positive_int(config, "intermediate_size"), **{**fields, **own})


def mistral(config: Mapping[str, Any]) -> DenseConfig:
    """Mistral, Mistral 3 and Ministral 3 (text): a window in all layers, or in none.

    In Ministral 3 queries grow with their position.
    """
    text = text_keys(config)
    if text.get("model_type") == "ministral3":
        text = {**_MINISTRAL3, **text}
    return DenseConfig.read(
        text,
        layers=uniform_layers(text, sliding_window(text, 4096)),
        intermediate_size=positive_int(text, "intermediate_size"),
        temperature=growing_queries(text),
    )


def growing_queries(config: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Return how queries grow with their position (DenseConfig.temperature); None if they do not.

    For Ministral 3 and Mistral 4.
    """
    described = rotary_parameters(config)
    if not described.get("llama_4_scaling_beta"):
        return None
    floor = positive_number(described, "original_max_position_embeddings")
    return floor, positive_number(described, "llama_4_scaling_beta"), 0.0


def qwen2(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 2 and 2.5, and the text part of 2.5-VL: biases on queries, keys and values."""
    text = text_keys(config)
    return llama(text, layers=qwen_layers(text), qkv_bias=True, o_bias=False, mlp_bias=False)


def qwen3(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3, and the text part of 3-VL: queries and keys are normalised per head."""
    text = text_keys(config)
    return llama(text, layers=qwen_layers(text), default_head_dim=128, mlp_bias=False, qk_norm=True)


def qwen_layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the layers; if windows are enabled, those from `max_window_layers` on have one by default."""
    num_layers = positive_int(config, "num_hidden_layers")
    window = sliding_window(config, 4096) if flag(config, "use_sliding_window", False) else None
    full = min(num_layers, int(config.get("max_window_layers", 28)) if window else num_layers)
    default = ("full_attention",) * full + ("sliding_attention",) * (num_layers - full)
    return mixed_layers(config, window, default)


def phi3(config: Mapping[str, Any]) -> DenseConfig:
    """Phi 3 and 4: like Llama, with fused tensors; Phi 4 mini rotates a part of each head."""
    return llama(
        config,
        layers=uniform_layers(config, sliding_window(config, None)),
        default_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        is_fused=True,
    )


def phi4_multimodal(config: Mapping[str, Any]) -> DenseConfig:
    """Phi-4-multimodal (text): Phi 4 mini. Its adapters for pictures and speech do not apply to text."""
    text = replace(phi3(config), beside=r"model\.embed_tokens_extend\..*|.*\.lora_[AB]\.(vision|speech)\.weight")
    if "Phi4MMForCausalLM" not in config["architectures"]:
        return text
    alone = [FusedRows(name, {name: text.hidden_size}) for name in ("self_attn.o_proj", "mlp.down_proj")]
    stored = [rows._replace(name=f"{rows.name}.base_layer") for rows in (*text.fused, *alone)]
    return replace(text, is_fused=False, divided=tuple(stored))


def granite(config: Mapping[str, Any]) -> DenseConfig:
    """Granite 3: like Llama, with multipliers of embeddings, attention scores, residuals and logits."""
    return llama(config, **granite_scales(config))


def granite_scales(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the multipliers of Granite 3, dense or with experts."""
    return {
        "attention_scale": positive_number(config, "attention_multiplier", 1.0),
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "logit_scale": 1.0 / positive_number(config, "logits_scaling", 1.0),
    }


def granite_swa(config: Mapping[str, Any]) -> DenseConfig:
    """Granite SWA: Granite 3 with windows in most layers, attention sinks, and a rotary base per layer."""
    return llama(config, default_eps=1e-5, default_tied=True, **granite_windows(config), **granite_scales(config))


def granite_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layers and rotary rules of Granite with windows; a base of 0 means no rotation."""
    num_layers, rule = positive_int(config, "num_hidden_layers"), read_rotary_rule(config)
    default = tuple("sliding_attention" if i % 4 else "full_attention" for i in range(num_layers))
    kinds = mixed_layers(config, sliding_window(config, 128), default)
    thetas = config.get("layer_rope_theta") or [rule.theta] * num_layers
    is_list = isinstance(thetas, list) and len(thetas) == num_layers
    if not is_list or not all(isinstance(theta, (int, float)) and theta >= 0 for theta in thetas):
        raise CheckpointError(f"config.json has layer_rope_theta = {thetas!r}; it must be a list of {num_layers} bases")
    bases = sorted({float(theta) for theta in thetas if theta})
    return {
        "rotary": tuple([rule._replace(theta=base) for base in bases]),
        "layers": tuple(
            kind._replace(rotary=bases.index(theta) if theta else None, has_sinks=True)
            for kind, theta in zip(kinds, thetas, strict=True)
        ),
    }


def arcee(config: Mapping[str, Any]) -> DenseConfig:
    """Arcee AFM: like Llama, with feed-forwards without a gate."""
    return llama(config, default_eps=1e-5, allowed_activation="relu2", activation="relu2")


def apertus(config: Mapping[str, Any]) -> DenseConfig:
    """Apertus: normalised heads, and feed-forwards without a gate, with the activation xIELU."""
    refuse_unless(config, "post_norm", False, None)
    refuse_unless(config, "qk_norm", True, None)
    has_rule = rotary_parameters(config) or "rope_theta" in config
    text = config if has_rule else {**config, "rope_parameters": _APERTUS}
    return llama(
        text,
        default_eps=1e-5,
        rotary=(read_rotary_rule(text, 12_000_000.0),),
        allowed_activation="xielu",
        activation="xielu",
        mlp_bias=False,
        norms=NormNames("attention_layernorm", None, "feedforward_layernorm", None),
        qk_norm=True,
    )


# The default rotary parameters.
_APERTUS = {
    "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip


def olmo2(config: Mapping[str, Any]) -> DenseConfig:
    """OLMo 2: norms only after attention and feed-forward; joint norms of all queries and of all keys."""
    return llama(config, default_eps=1e-5, mlp_bias=False, norms=_BEHIND, joint_qk_norm=True)


def olmo3(config: Mapping[str, Any]) -> DenseConfig:
    """OLMo 3: like OLMo 2, with windows in three of four layers, which have no rotary scaling."""
    theta = number(config, "rope_theta", 500_000.0)
    return llama(
        config,
        default_eps=1e-5,
        mlp_bias=False,
        norms=_BEHIND,
        joint_qk_norm=True,
        layers=mixed_layers(config, sliding_window(config, 4096), every_nth(config, 4), sliding_rotary=1),
        rotary=rules_by_type(config, theta, theta),
    )


def exaone4(config: Mapping[str, Any]) -> DenseConfig:
    """EXAONE 4: norms only after attention and feed-forward; heads are normalised."""
    return llama(
        config,
        default_eps=1e-5,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        norms=_BEHIND,
        qk_norm=True,
        layers=exaone_layers(config),
    )


def exaone_layers(config: Mapping[str, Any]) -> tuple[LayerKind, ...]:
    """Return the layers of EXAONE. If some have a window, the others are not rotated."""
    pattern = config.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):  # such as LLLG: the layers of a period, L with a window, G with full attention
        if pattern.strip("L") != "G":
            raise CheckpointError(
                f"config.json has sliding_window_pattern = {pattern!r}; it must be some L's, then one G"
            )
        pattern = len(pattern)
    window = sliding_window(config, 4096)
    period = positive_int({"sliding_window_pattern": pattern}, "sliding_window_pattern") if window and pattern else 0
    full_rotary = 0 if window is None else None
    return mixed_layers(config, window, every_nth(config, period), full_rotary=full_rotary)


def smollm3(config: Mapping[str, Any]) -> DenseConfig:
    """SmolLM 3: like Llama, without rotation in every fourth layer."""
    num_layers = positive_int(config, "num_hidden_layers")
    turns = layers_that_turn(config, num_layers)
    window = sliding_window(config, None) if flag(config, "use_sliding_window", False) else None
    types = config.get("layer_types") or [
        "full_attention" if turn or not window else "sliding_attention" for turn in turns
    ]
    layers = mixed_layers({**config, "layer_types": types}, window, ())
    return llama(
        config,
        layers=tuple(kind._replace(rotary=0 if turn else None) for kind, turn in zip(layers, turns, strict=True)),
        rotary=(read_rotary_rule(config, 2_000_000.0),),
        default_tied=True,
    )


def layers_that_turn(config: Mapping[str, Any], num_layers: int) -> list[bool]:
    """Return whether each layer rotates; by default all but every `no_rope_layer_interval`-th do."""
    interval = positive_int(config, "no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(turns, list) or len(turns) < num_layers:
        raise CheckpointError(
            f"config.json has no_rope_layers = {turns!r}; it must be a list of {num_layers}: 1 for a layer that turns"
        )
    return [bool(turn) for turn in turns[:num_layers]]


def seed_oss(config: Mapping[str, Any]) -> DenseConfig:
    """Seed-OSS: like Llama, with biases on queries, keys and values, and optionally on attention's output."""
    return llama(
        config,
        default_head_dim=128,
        qkv_bias=flag(config, "attention_bias", True),
        o_bias=flag(config, "attention_out_bias", False),
    )


def glm4(config: Mapping[str, Any]) -> DenseConfig:
    """GLM-4: like GLM-4 9B of 2024, with norms before and after each block."""
    return glm(config, norms=_AROUND_IN_GLM)


def glm(config: Mapping[str, Any], **own: Any) -> DenseConfig:
    """GLM-4 9B of 2024 and GLM Edge: half of each head is rotated, in adjacent pairs.

    The checkpoint has gate and up projections in one tensor.
    """
    return llama(
        config,
        default_head_dim=128,
        default_eps=1.5625e-07,
        rotary=(read_rotary_rule(config, default_share=0.5),),
        is_interleaved=True,
        qkv_bias=flag(config, "attention_bias", True),
        o_bias=False,
        mlp_bias=False,
        is_fused=True,
        **own,
    )


def ernie(config: Mapping[str, Any]) -> DenseConfig:
    """Ernie 4.5: like Llama, with rotation of adjacent pairs."""
    bias = flag(config, "use_bias", False)
    return llama(
        config,
        default_head_dim=128,
        default_eps=1e-5,
        rotary=(read_rotary_rule(config, 500_000.0),),
        is_interleaved=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        default_tied=True,
    )


def gemma(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma and CodeGemma: like Llama, with Gemma's norms, embeddings and activation."""
    refuse_unless(config, "use_bidirectional_attention", False, None)
    named = config.get("hidden_act", "gelu_pytorch_tanh")
    activation = "gelu_pytorch_tanh" if named == "gelu" else named  # published checkpoints mean the approximation
    return gemma_decoder(
        {**config, "hidden_activation": activation},
        norms=NORMS_BEFORE,
        attention_scale=positive_int(config, "head_dim", 256) ** -0.5,
    )


def gemma2(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma 2: norms before and after attention and feed-forward, alternating windows, soft caps."""
    refuse_unless(config, "use_bidirectional_attention", False, None)
    return gemma_decoder(
        config,
        layers=mixed_layers(config, sliding_window(config, 4096), every_nth(config, 2)),
        rotary=(read_rotary_rule(config),),
        soft_cap=read_cap(config, "attn_logit_softcapping", 50.0),
        logit_cap=read_cap(config, "final_logit_softcapping", 30.0),
    )


def gemma3(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma 3 (text): like Gemma 2 without caps, with normalised heads and windows in most layers.

    Layers with a window have a separate rotary base.
    """
    text = text_keys(config)
    if text is not config:
        text = {**_GEMMA3, **text}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        refuse_unless(text, key, None)
    is_bidirectional = flag(text, "use_bidirectional_attention", False)
    window = sliding_window(text, 4096)
    if is_bidirectional and window is not None:  # transformers puts half of the window on each side
        window = window // 2 + 1
    period = positive_int(text, "sliding_window_pattern", 6)  # by default every sixth layer has full attention
    thetas = number(text, "rope_theta", 1_000_000.0), number(text, "rope_local_base_freq", 10_000.0)
    return gemma_decoder(
        text,
        layers=mixed_layers(text, window, every_nth(text, period), sliding_rotary=1),
        rotary=rules_by_type(text, *thetas),
        qk_norm=True,
        is_bidirectional=is_bidirectional,
    )


def gemma_decoder(config: Mapping[str, Any], kind: type[DenseConfig] = DenseConfig, **own: Any) -> DenseConfig:
    """Return a config with the fields that Gemma 2, 3 and 4 share, and those of one of them, `own`."""
    bias = flag(config, "attention_bias", False)
    fields = {
        "norm_offset": 1.0,
        "attention_scale": positive_number(config, "query_pre_attn_scalar", 256.0) ** -0.5,
        "norms": NormNames(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
        ),
    }
    return kind.read(
        config,
        activation_key="hidden_activation",
        allowed_activation="gelu_pytorch_tanh",
        default_head_dim=256,
        default_tied=True,
        intermediate_size=positive_int(config, "intermediate_size"),
        qkv_bias=bias,
        o_bias=bias,
        activation="gelu_tanh",
        embedding_scale=positive_int(config, "hidden_size") ** 0.5,
        **{**fields, **own},
    )


def read_cap(config: Mapping[str, Any], key: str, default: float | None) -> float | None:
    """Return a cap, or None if config.json has null."""
    return None if config.get(key, default) is None else positive_number(config, key, default)

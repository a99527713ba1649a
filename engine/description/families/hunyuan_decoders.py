"""Tencent's HunYuan: heads are normalised after rotation.

A family is a function here, which reads config.json with the defaults of transformers' configuration classes, and a row of config_registry.py.
"""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.decoder_config import read_top_k
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.rotary_scaling import RotaryRule, read_rotary_rule, rotary_parameters
from pilotlight.engine.description.shapes import ExpertNames, ExpertsShape, Routing, SparseShape
from pilotlight.engine.description.sparse_config import SparseConfig
from pilotlight.engine.weights.config import flag, number, positive_int, positive_number, refuse_unless
from pilotlight.engine.weights.fused import FusedRows

_NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")


def hunyuan(config: Mapping[str, Any]) -> DenseConfig:
    """HunYuan 0.5B to 7B: like Llama, with normalised heads."""
    return DenseConfig.read(config, **_shared_fields(config))


def hunyuan_moe(config: Mapping[str, Any]) -> SparseConfig:
    """HunYuan A13B: a softmax chooses experts in every layer, and there is a shared expert of their size."""
    num_layers, inner = positive_int(config, "num_hidden_layers"), positive_int(config, "intermediate_size")
    # Published checkpoints have these values once for each layer.
    same = {key: _of_all_layers(config, key) for key in ("num_experts", "moe_topk", "moe_intermediate_size")}
    refuse_unless(same, "moe_intermediate_size", None, inner)
    refuse_unless({"num_shared_expert": _of_all_layers(config, "num_shared_expert")}, "num_shared_expert", None, 1)
    num_experts = positive_int(same, "num_experts", 1)
    top_k = read_top_k({"num_experts_per_tok": same["moe_topk"]}, num_experts, 1)
    shape = ExpertsShape(num_experts, positive_int(config, "hidden_size"), inner)
    return SparseConfig.read(
        config,
        **_shared_fields(config),
        sparse=SparseShape(shape, Routing(top_k, True, is_wide=True), inner, _NAMES),
        sparse_layers=frozenset(range(num_layers)),
    )


def _shared_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    refuse_unless(config, "use_qk_norm", True, None)
    refuse_unless(config, "use_cla", False, None)  # keys and values that layers share
    bias, heads = flag(config, "attention_bias", False), positive_int(config, "num_attention_heads")
    dim = positive_int(config, "head_dim", positive_int(config, "hidden_size") // heads)
    return {
        "default_eps": 1e-5,
        "intermediate_size": positive_int(config, "intermediate_size"),
        "rotary": (_rotary(config, dim),),
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "turns_first": True,
        "divided": tuple([FusedRows(f"{part}_layernorm", {f"{part[0]}_norm": dim}) for part in ("query", "key")]),
    }


def _rotary(config: Mapping[str, Any], head_dim: int) -> RotaryRule:
    """Return the rotary rule. With `alpha`, the rule called dynamic is a larger base for every length."""
    described = rotary_parameters(config)
    kind = described.get("rope_type") or described.get("type")
    if kind != "dynamic" or not described.get("alpha"):
        return read_rotary_rule(config)
    theta = positive_number(described, "rope_theta", number(config, "rope_theta", 10_000.0))
    return RotaryRule("default", theta * positive_number(described, "alpha") ** (head_dim / (head_dim - 2)))


def _of_all_layers(config: Mapping[str, Any], key: str) -> Any:
    """Return a value that may be a list of one for each layer. Raises CheckpointError if layers differ."""
    value = config.get(key)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be the same for all layers")
    return value[0]

"""The config of DeepSeek-V3, Kimi K2 and K2.5: latent attention, whose keys and values are one short vector of a token in each layer, a few dense
layers, then experts with shared ones beside them. A vision tower is weights alone here.

Defaults are those of deepseek-ai/DeepSeek-V3's configuration_deepseek.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine.description.decoder_config import DecoderConfig, LayerKind, read_top_k, refuse_unless, text_keys
from engine.description.rotary import RotaryRule, read_rotary_rule, sharpening
from engine.description.shapes import ExpertsShape, GroupedRouting, LatentShape
from engine.description.vision import VisionShape
from engine.description.weights import WeightShape, experts, gated, norm, projections, summed
from engine.errors import CheckpointError
from engine.kv.layout import CachedLayer, CacheSegment
from engine.weights.config import flag, number, positive_int, positive_number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(DecoderConfig):
    """`head_dim` is what turns of each head; `num_kv_heads` 0: all heads read the same, so that ranks cannot share it."""

    q_rank: int | None  # None: queries are projected at once
    kv_rank: int
    nope_dim: int
    value_dim: int
    intermediate_size: int  # of dense layers
    experts: ExpertsShape
    routing: GroupedRouting
    num_shared: int
    sparse_layers: frozenset[int]
    num_mtp_layers: int  # behind the others: they predict further tokens
    vision: VisionShape | None

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return (CachedLayer((CacheSegment("latent", 1, self.kv_rank + self.head_dim),)),) * self.num_layers

    @property
    def attended_numbers(self) -> int:
        return self.num_heads * (2 * self.kv_rank + self.head_dim)

    @property
    def outer_weights(self) -> list[WeightShape]:
        return self.text_weights + (self.vision.weights(self.hidden_size) if self.vision else [])

    def latent_attention(self, layer: int) -> LatentShape:
        return LatentShape(
            self.num_heads,
            self.q_rank,
            self.kv_rank,
            self.head_dim,
            self.nope_dim,
            self.value_dim,
            self.attention_scale,
            layer,
        )

    def layer_weights(self, layer: int, name: str) -> list[WeightShape]:
        mlp, hidden = f"{name}.mlp", self.hidden_size
        attention = [*self._attention(f"{name}.self_attn"), *(norm(f"{name}.norm_{i}", hidden) for i in range(2))]
        if layer not in self.sparse_layers:
            return [*attention, *gated(mlp, hidden, self.intermediate_size)]
        shared = self.num_shared * self.experts.intermediate_size
        gate, num_experts = f"{mlp}.gate", self.experts.num_experts
        return [
            *attention,
            WeightShape("router", gate, num_experts, hidden, is_wide=True),
            WeightShape("router", f"{gate}.e_score_correction_bias", num_experts, is_wide=True),
            *experts(f"{mlp}.experts", self.experts, self.routing.top_k),
            *(gated(f"{mlp}.shared_experts", hidden, shared, part="shared_experts") if shared else []),
        ]

    def _attention(self, name: str) -> list[WeightShape]:
        hidden, heads, key_dim = self.hidden_size, self.num_heads, self.nope_dim + self.head_dim
        found = []
        if self.q_rank is None:
            found += projections("attention", [f"{name}.q_proj"], [heads * key_dim], hidden, unit=key_dim)
        else:
            found += [
                WeightShape("attention", f"{name}.q_a_proj", self.q_rank, hidden),
                norm(f"{name}.q_a_layernorm", self.q_rank),
                *projections("attention", [f"{name}.q_b_proj"], [heads * key_dim], self.q_rank, unit=key_dim),
            ]
        both = self.nope_dim + self.value_dim
        return [
            *found,
            WeightShape("attention", f"{name}.kv_a_proj_with_mqa", self.kv_rank + self.head_dim, hidden),
            norm(f"{name}.kv_a_layernorm", self.kv_rank),
            WeightShape("attention", f"{name}.kv_b_proj", heads * both, self.kv_rank, "rows", both, is_unpacked=True),
            *summed("attention", f"{name}.o_proj", hidden, heads * self.value_dim, unit=self.value_dim),
        ]


def parse_config(config: Mapping[str, Any]) -> LatentConfig:
    """Read a config.json. One with a vision tower keeps the decoder's keys under text_config."""
    text = text_keys(config)
    refuse_unless(text, "attention_bias", False)
    refuse_unless(text, "rope_interleave", True, None)
    num_layers, dense = positive_int(text, "num_hidden_layers"), int(text.get("first_k_dense_replace") or 0)
    every = positive_int(text, "moe_layer_freq", 1)
    num_experts, nope_dim = positive_int(text, "n_routed_experts"), positive_int(text, "qk_nope_head_dim")
    rope_dim, rule = positive_int(text, "qk_rope_head_dim"), read_rotary_rule(text)
    read = LatentConfig.read(
        {**text, "head_dim": rope_dim},
        rotary=(rule,),
        attention_scale=(nope_dim + rope_dim) ** -0.5 * _sharpened(text, rule),
        layers=(LayerKind(),) * num_layers,
        q_rank=None if text.get("q_lora_rank") is None else positive_int(text, "q_lora_rank"),
        kv_rank=positive_int(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=positive_int(text, "v_head_dim"),
        intermediate_size=positive_int(text, "intermediate_size"),
        experts=ExpertsShape(
            num_experts, positive_int(text, "hidden_size"), positive_int(text, "moe_intermediate_size")
        ),
        routing=_routing(text, num_experts),
        num_shared=int(text.get("n_shared_experts") or 0),
        sparse_layers=frozenset(i for i in range(dense, num_layers) if i % every == 0),
        num_mtp_layers=int(text.get("num_nextn_predict_layers") or 0),
        vision=_vision(config.get("vision_config")),
    )
    return replace(read, num_kv_heads=0)


def _sharpened(config: Mapping[str, Any], rule: RotaryRule) -> float:
    """Return what YaRN multiplies scores with. The part of it that `rule` has is in the queries and keys."""
    described = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = number(described, "mscale_all_dim", 0.0)
    return sharpening(rule.values["factor"], weight) ** 2 if rule.rope_type == "yarn" and weight else 1.0


def _routing(config: Mapping[str, Any], num_experts: int) -> GroupedRouting:
    refuse_unless(config, "scoring_func", "sigmoid", None)
    refuse_unless(config, "topk_method", "noaux_tc", None)
    top_k = read_top_k(config, num_experts)
    groups, top_groups = positive_int(config, "n_group", 8), positive_int(config, "topk_group", 4)
    size = num_experts // groups
    if num_experts % groups or top_groups > groups or top_k > top_groups * size or (size < 2 and top_groups < groups):
        raise CheckpointError(
            f"config.json has n_group = {groups}, topk_group = {top_groups} and num_experts_per_tok = {top_k} for {num_experts} experts: "
            "groups must be even, of two experts at least, and the chosen ones must hold as many as a token goes to"
        )
    scale = positive_number(config, "routed_scaling_factor", 2.5)
    return GroupedRouting(top_k, groups, top_groups, flag(config, "norm_topk_prob", True), scale)


def _vision(config: Mapping[str, Any] | None) -> VisionShape | None:
    if not config:
        return None
    hidden, patch = positive_int(config, "vt_hidden_size"), positive_int(config, "patch_size")
    height, width = config.get("merge_kernel_size") or (2, 2)
    joined = hidden * height * width
    return VisionShape(
        num_layers=positive_int(config, "vt_num_hidden_layers"),
        hidden_size=hidden,
        intermediate_size=positive_int(config, "vt_intermediate_size"),
        patch_numbers=3 * patch**2,
        num_positions=positive_int(config, "init_pos_emb_height") * positive_int(config, "init_pos_emb_width"),
        projections=((joined, joined), (0, joined)),
    )

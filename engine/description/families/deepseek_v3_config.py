"""The config of DeepSeek-V3, Kimi K2 and K2.5: latent attention, whose keys and values are one short vector of a token in each layer, a few dense
layers, then experts with shared ones beside them. A vision tower is weights alone here.

Defaults are those of deepseek-ai/DeepSeek-V3's configuration_deepseek.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pilotlight.engine.description.decoder_config import LayerKind, refuse_unless, text_keys
from pilotlight.engine.description.grouped_moe import GroupedMoeConfig, read_experts
from pilotlight.engine.description.rotary_scaling import RotaryRule, read_rotary_rule, sharpening
from pilotlight.engine.description.shapes import NO_IMAGES, ImageBytes, LatentShape
from pilotlight.engine.description.tensor_sizes import WeightShape, norm, projections, summed
from pilotlight.engine.description.vision_config import ENCODED_BYTES, PatchedVision
from pilotlight.engine.kv.pool.layout import CachedLayer, CacheSegment
from pilotlight.engine.weights.config import number, positive_int

# The most keys and values that are made of a context's vectors (engine/layers/expanded_attention.py): in bf16 those of 10,900 tokens in 16 heads
# of DeepSeek-V3's. Every rank holds as much back from its cache.
EXPANDED_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(GroupedMoeConfig):
    """`head_dim` is what turns of each head; `num_kv_heads` 0: all heads read the same, so that ranks cannot share it."""

    q_rank: int | None  # None: queries are projected at once
    kv_rank: int
    nope_dim: int
    value_dim: int
    vision: PatchedVision | None

    @property
    def cached_layers(self) -> tuple[CachedLayer, ...]:
        return (CachedLayer((CacheSegment("latent", 1, self.kv_rank + self.head_dim),)),) * self.num_layers

    @property
    def attended_numbers(self) -> int:
        return self.num_heads * (2 * self.kv_rank + self.head_dim)

    def attention_bytes(self, tokens: int, ranks: int, item_bytes: int) -> int:
        """Queries and what they give in absorbed form; or keys and values of a context, made and then laid side by side."""
        absorbed = 2 * tokens * self.num_heads // ranks * self.kv_rank * item_bytes
        width = max(self.nope_dim + self.head_dim, self.value_dim)
        return max(absorbed, EXPANDED_BYTES + EXPANDED_BYTES * (self.nope_dim + self.value_dim) // (2 * width))

    def image_bytes(self, item_bytes: int) -> ImageBytes:
        return ImageBytes(ENCODED_BYTES, self.vision.encoding_bytes(item_bytes)) if self.vision else NO_IMAGES

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
        norms = [norm(f"{name}.norm_{i}", self.hidden_size) for i in range(2)]
        return [*self._attention(f"{name}.self_attn"), *norms, *self.feed_forward_weights(layer, f"{name}.mlp")]

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
    nope_dim, rope_dim = positive_int(text, "qk_nope_head_dim"), positive_int(text, "qk_rope_head_dim")
    rule = read_rotary_rule(text)
    read = LatentConfig.read(
        {**text, "head_dim": rope_dim},
        rotary=(rule,),
        attention_scale=(nope_dim + rope_dim) ** -0.5 * _sharpened(text, rule),
        layers=(LayerKind(),) * positive_int(text, "num_hidden_layers"),
        q_rank=None if text.get("q_lora_rank") is None else positive_int(text, "q_lora_rank"),
        kv_rank=positive_int(text, "kv_lora_rank"),
        nope_dim=nope_dim,
        value_dim=positive_int(text, "v_head_dim"),
        vision=PatchedVision.read(vision) if (vision := config.get("vision_config")) else None,
        **read_experts(text, groups=8, top_groups=4, scale=2.5),
    )
    return replace(read, num_kv_heads=0)


def _sharpened(config: Mapping[str, Any], rule: RotaryRule) -> float:
    """Return what YaRN multiplies scores with. The part of it that `rule` has is in the queries and keys."""
    described = config.get("rope_parameters") or config.get("rope_scaling") or {}
    weight = number(described, "mscale_all_dim", 0.0)
    return sharpening(rule.values["factor"], weight) ** 2 if rule.rope_type == "yarn" and weight else 1.0

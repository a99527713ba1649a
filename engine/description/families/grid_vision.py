"""Models of Qwen and GLM with a vision tower, in which images are rotated by row and column.

The keys of the tower are under vision_config, those of the decoder under text_config.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.description.decoder_config import text_keys
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families.dense_decoders import qwen2, qwen3
from pilotlight.engine.description.families.expert_decoders import glm_v as glm_v_text
from pilotlight.engine.description.families.expert_decoders import qwen3_moe
from pilotlight.engine.description.families.hybrid_decoders import qwen3_5, qwen3_5_moe
from pilotlight.engine.description.rotary_scaling import RotaryRule, by_place
from pilotlight.engine.description.vision_config import GlmVision, GridVision

_TOWER = r"(model\.)?visual\..*"


def qwen2_5_vl(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 2.5-VL."""
    return _with_tower(config, qwen2, (16, 24, 24), is_gated=True)


def qwen3_vl(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3-VL."""
    return _with_tower(config, qwen3, (24, 20, 20))


def qwen3_vl_moe(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3-VL MoE."""
    return _with_tower(config, qwen3_moe, (24, 20, 20))


def qwen3_5_vision(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3.5 and 3.6."""
    return _with_tower(config, qwen3_5, (11, 11, 10))


def qwen3_5_moe_vision(config: Mapping[str, Any]) -> DenseConfig:
    """Qwen 3.5 and 3.6 MoE."""
    return _with_tower(config, qwen3_5_moe, (11, 11, 10))


def glm_v(config: Mapping[str, Any]) -> DenseConfig:
    """GLM-4.1V, 4.5V and 4.6V."""
    decoder, vision = replace(glm_v_text(config), beside=_TOWER), config.get("vision_config")
    if not vision:
        return decoder
    placed = _placed(decoder, config, (8, 12, 12), interleaved=False)
    return replace(decoder, rotary=(placed,), vision=GlmVision.read(vision, decoder.hidden_size))


def _with_tower(
    config: Mapping[str, Any],
    read: Callable[[Mapping[str, Any]], DenseConfig],
    sections: tuple[int, ...],
    *,
    is_gated: bool = False,
) -> DenseConfig:
    """Parse the decoder with `read`, and the tower if config.json describes one.

    `sections`: default of mrope_section.
    """
    decoder, vision = replace(read(config), beside=_TOWER), config.get("vision_config")
    if not vision:
        return decoder
    placed = _placed(decoder, config, sections, interleaved=not is_gated)
    return replace(decoder, rotary=(placed,), vision=GridVision.read(vision, decoder.hidden_size, is_gated=is_gated))


def _placed(
    decoder: DenseConfig, config: Mapping[str, Any], sections: tuple[int, ...], *, interleaved: bool
) -> RotaryRule:
    [rule] = decoder.rotary
    return by_place(rule, text_keys(config), decoder.head_dim, sections, interleaved=interleaved)

"""Models of Gemma with a vision tower.

In most of them the tokens of an image attend to each other in both directions. The keys of the tower are under vision_config, those of the decoder
under text_config.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.description.decoder_config import text_keys
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families import dense_decoders, gemma4_config
from pilotlight.engine.description.shapes import WholeImages
from pilotlight.engine.description.vision_config import MOST_SOFT_TOKENS, Gemma4Vision, SiglipVision

_TOWERS = r"(model\.)?(vision_tower|multi_modal_projector|embed_vision|audio_tower|embed_audio)\..*"


def gemma3(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma 3."""
    decoder = replace(dense_decoders.gemma3(config), beside=_TOWERS)
    if not config.get("vision_config"):
        return decoder
    vision = SiglipVision.read(config)
    return replace(decoder, vision=vision, whole_images=WholeImages(vision.num_tokens))


def gemma4(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma 4."""
    decoder = replace(gemma4_config.parse_config(config), beside=_TOWERS)
    if not config.get("vision_config"):
        return decoder
    is_mutual = text_keys(config).get("use_bidirectional_attention") == "vision"
    whole = WholeImages(MOST_SOFT_TOKENS, only_in_windows=True) if is_mutual else None
    return replace(decoder, vision=Gemma4Vision.read(config["vision_config"]), whole_images=whole)

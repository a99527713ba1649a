"""Models of Gemma with a vision tower.

The tokens of an image attend to each other in both directions. The keys of the tower are under vision_config, those of the decoder under text_config.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.families import dense_decoders
from pilotlight.engine.description.shapes import WholeImages
from pilotlight.engine.description.vision_config import SiglipVision


def gemma3(config: Mapping[str, Any]) -> DenseConfig:
    """Gemma 3."""
    decoder = dense_decoders.gemma3(config)
    if not config.get("vision_config"):
        return decoder
    vision = SiglipVision.read(config)
    return replace(decoder, vision=vision, whole_images=WholeImages(vision.num_tokens))

"""Loads the vision towers of models whose decoders are described by DenseConfig."""

from collections.abc import Callable
from typing import Any, NamedTuple

from pilotlight.engine.description.vision_config import (
    Gemma4Vision,
    GlmVision,
    GridVision,
    PatchedVision,
    PixtralVision,
    SiglipVision,
    VisionShape,
)
from pilotlight.engine.models.decoder import VisionEncoder
from pilotlight.engine.vision import gemma4_tower, glm_tower, grid_tower, kimi_tower, pixtral_tower, siglip_tower
from pilotlight.engine.weights.loader import WeightLoader


class _Tower(NamedTuple):
    encoder: Callable[[Any, WeightLoader, str, int], VisionEncoder]
    roots: tuple[str, ...]  # possible prefixes of the names of the tower's tensors
    first: str  # name of one of the tower's tensors, by which the prefix is found


_TOWERS = {
    GridVision: _Tower(grid_tower.GridEncoder, grid_tower.ROOTS, grid_tower.FIRST),
    GlmVision: _Tower(glm_tower.GlmEncoder, glm_tower.ROOTS, glm_tower.FIRST),
    PatchedVision: _Tower(kimi_tower.PatchEncoder, kimi_tower.ROOTS, kimi_tower.FIRST),
    PixtralVision: _Tower(pixtral_tower.PixtralEncoder, pixtral_tower.ROOTS, pixtral_tower.FIRST),
    Gemma4Vision: _Tower(gemma4_tower.Gemma4Encoder, gemma4_tower.ROOTS, gemma4_tower.FIRST),
    SiglipVision: _Tower(siglip_tower.SiglipEncoder, siglip_tower.ROOTS, siglip_tower.FIRST),
}


def load_tower(shape: VisionShape | None, loader: WeightLoader, decoder_size: int) -> VisionEncoder | None:
    """Load the tower that a config.json describes; None if it describes none, or the checkpoint has none."""
    if shape is None:
        return None
    encoder, roots, first = _TOWERS[type(shape)]
    root = next((root for root in roots if f"{root}{first}" in loader), None)
    return None if root is None else encoder(shape, loader, root, decoder_size)

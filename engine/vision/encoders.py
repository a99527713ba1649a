"""The vision towers that stand beside plain decoders."""

from pilotlight.engine.description.vision_config import GridVision, PixtralVision, VisionShape
from pilotlight.engine.vision import grid_tower, pixtral_tower
from pilotlight.engine.vision.grid_tower import GridEncoder
from pilotlight.engine.vision.pixtral_tower import PixtralEncoder
from pilotlight.engine.weights.loader import WeightLoader


def load_tower(
    shape: VisionShape | None, loader: WeightLoader, decoder_size: int
) -> GridEncoder | PixtralEncoder | None:
    """Load the tower that a config.json describes, or return None where the checkpoint has none."""
    if isinstance(shape, GridVision):
        root = _root(loader, grid_tower.ROOTS, grid_tower.FIRST)
        return None if root is None else GridEncoder(shape, loader, root, decoder_size)
    if isinstance(shape, PixtralVision):
        root = _root(loader, pixtral_tower.ROOTS, pixtral_tower.FIRST)
        return None if root is None else PixtralEncoder(shape, loader, root, decoder_size)
    return None


def _root(loader: WeightLoader, roots: tuple[str, ...], first: str) -> str | None:
    """Return the prefix of a tower's tensors, of which `first` is one."""
    return next((root for root in roots if f"{root}{first}" in loader), None)

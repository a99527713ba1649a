"""Encoded images of a model on one rank's device, and what a step takes of them."""

from array import array
from collections.abc import Sequence

import torch

from pilotlight.engine.core.step import ImageInput
from pilotlight.engine.device.transfer import to_device
from pilotlight.engine.execution.context import ImageRows


class ImageMemory:
    def __init__(self) -> None:
        self._pieces: dict[bytes, list[torch.Tensor]] = {}  # pieces of an image [tokens, hidden], in order

    def add(self, name: bytes, piece: torch.Tensor) -> None:
        """Keep the next piece of an image."""
        self._pieces.setdefault(name, []).append(piece)

    def drop(self, name: bytes) -> None:
        self._pieces.pop(name, None)

    def rows(self, images: Sequence[ImageInput], device: torch.device) -> ImageRows | None:
        """Return the embeddings of a step's images, or None if it has no images."""
        if not images:
            return None
        rows = array("q", [row for image in images for row in image.rows])
        found = []
        for image in images:
            pieces = self._pieces[image.name]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            found.append(whole[image.first : image.first + len(image.rows)])
        return ImageRows(to_device(torch.frombuffer(rows, dtype=torch.int64), device), torch.cat(found))

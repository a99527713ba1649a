"""The encoded images of a model on one rank's device, and the embeddings that a step uses."""

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
        """Return the embeddings of a step's images and their rows in the step, or None if it has no images."""
        if not images:
            return None
        numbers = array("q", [row for image in images for row in image.rows])
        count, has_places = len(numbers), bool(images[0].columns)
        if has_places:
            each = [divmod(image.first + i, image.columns) for image in images for i in range(len(image.rows))]
            numbers.extend([place for column in zip(*each, strict=True) for place in column])
        there = to_device(torch.frombuffer(numbers, dtype=torch.int64), device)
        embeddings = torch.cat([self._found(image) for image in images]) if self._pieces else None
        return ImageRows(there[:count], embeddings, there[count:].view(2, count) if has_places else None)

    def _found(self, image: ImageInput) -> torch.Tensor:
        pieces = self._pieces[image.name]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return whole[image.first : image.first + len(image.rows)]

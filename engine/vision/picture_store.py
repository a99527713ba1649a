"""A model's image encoder in one process.

Images are prepared in any thread, and encoded by the model's runner between two steps.
"""

import torch

from pilotlight.engine.description.image_sizes import ImageSizes
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.vision.picture import PreparedImage, prepare_image


class RunnerImages:
    def __init__(self, runner: ModelRunner, sizes: ImageSizes, token_bytes: int) -> None:
        """`sizes`: rule for the sizes of images; `token_bytes`: size of one embedding."""
        self.placeholder = sizes.placeholder
        self.token_bytes = token_bytes
        self._sizes = sizes
        self._runner = runner

    def prepare(self, data: bytes) -> PreparedImage:
        return prepare_image(data, self._sizes)

    def encode(self, name: bytes, piece: torch.Tensor) -> None:
        self._runner.encode_image(name, piece)

    def drop(self, name: bytes) -> None:
        self._runner.images.drop(name)

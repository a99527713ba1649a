"""A model's image encoder on the only or first rank.

Images are prepared in any thread, and encoded by the model's runner between two steps. Every rank encodes all images, between the same two steps.
"""

from collections.abc import Callable

import torch

from pilotlight.engine.description.image_sizes import ImageSizes
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.parallel.orders import DropImage, EncodeImage
from pilotlight.engine.vision.picture import PreparedImage, prepare_image


class RunnerImages:
    def __init__(
        self, runner: ModelRunner, sizes: ImageSizes, token_bytes: int, model: str, send: Callable[[object], None]
    ) -> None:
        """`sizes`: rule for the sizes of images; `token_bytes`: size of one embedding.

        `send`: sends orders about `model` to other ranks.
        """
        self.placeholder = sizes.placeholder
        self.token_bytes = token_bytes
        self._sizes = sizes
        self._runner = runner
        self._model = model
        self._send = send

    def prepare(self, data: bytes) -> PreparedImage:
        return prepare_image(data, self._sizes)

    def encode(self, name: bytes, piece: torch.Tensor) -> None:
        self._send(EncodeImage(self._model, name, piece))
        self._runner.encode_image(name, piece)

    def drop(self, name: bytes) -> None:
        self._send(DropImage(self._model, name))
        self._runner.images.drop(name)

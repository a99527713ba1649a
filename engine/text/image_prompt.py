"""Replaces an image's placeholder in a prompt by the tokens with which the model was trained.

Their number is the same as in the checkpoint's own processor. It only depends on the image's width and height (engine/description/image_sizes.py), so
no image is decoded. This module knows token ids, and is independent of pixels, files and torch.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import PromptImage
from pilotlight.engine.description.image_sizes import (
    FilledImages,
    PatchedImages,
    RowedImages,
    ScaledImages,
    SquareImages,
    TiledImages,
    read_image_sizes,
)

# Supported file formats, by Pillow's names.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_MOST_STRETCHED = 200  # largest ratio of an image's sides in Qwen's own processor
MOST_PIXELS = 64_000_000  # most pixels of one image, which take 192 MB when decoded


class ImagePromptError(Exception):
    """A prompt and its images do not match, or an image is not supported; the message is for the user."""


class SizedImage(NamedTuple):
    """An image file and the size from its header."""

    width: int
    height: int
    digest: bytes  # sha256 of the file
    data: bytes


class ImageRun(NamedTuple):
    """The tokens that represent one image."""

    token_ids: tuple[int, ...]
    first: int  # index of the first token that an embedding replaces
    last: int
    columns: int = 0  # embeddings per row, for models that rotate them by row and column; else 0
    is_bidirectional: bool = False  # the tokens from `first` to `last` attend to each other in both directions


class ImageTokens(Protocol):
    """The tokens with which a model family represents an image."""

    marker: int  # the token that a chat template writes for an image
    around: tuple[str, str] | None = None  # the marker, and text to put on both sides of it before a prompt is encoded

    def run(self, width: int, height: int) -> ImageRun: ...


class TiledTokens(ImageTokens):
    """Llama 4's tokens: rows of tiles with separators, then a marker and the whole image as one tile."""

    def __init__(self, sizes: TiledImages, token_id: Callable[[str], int]) -> None:
        self._sizes = sizes
        self.marker = token_id("<|image|>")
        self._begin, self._end = token_id("<|image_start|>"), token_id("<|image_end|>")
        self._next_tile, self._next_row = token_id("<|tile_x_separator|>"), token_id("<|tile_y_separator|>")

    def run(self, width: int, height: int) -> ImageRun:
        grid, tile = self._sizes.grid(width, height), (self._sizes.placeholder,) * self._sizes.tile_tokens
        tiles: tuple[int, ...] = ()
        if grid.num_tiles > 1:
            row = ((*tile, self._next_tile) * grid.columns)[:-1]
            tiles = (*row, self._next_row) * grid.rows
        token_ids = (self._begin, *tiles, self.marker, *tile, self._end)
        return ImageRun(token_ids, 1 if tiles else 2, len(token_ids) - 2)


class PatchedTokens(ImageTokens):
    """The tokens of Kimi and Qwen: the marker, once per embedding."""

    def __init__(self, sizes: PatchedImages | ScaledImages) -> None:
        self._sizes = sizes
        self.marker = sizes.placeholder

    def run(self, width: int, height: int) -> ImageRun:
        if isinstance(self._sizes, ScaledImages) and max(width, height) > _MOST_STRETCHED * min(width, height):
            raise ImagePromptError(
                f"an image has {width} x {height} pixels; this model takes images of which one side is at most {_MOST_STRETCHED} times the other"
            )
        count = self._sizes.num_tokens(width, height)
        columns = self._sizes.grid(width, height).columns // self._sizes.merge
        return ImageRun((self.marker,) * count, 0, count - 1, columns if isinstance(self._sizes, ScaledImages) else 0)


class RowedTokens(ImageTokens):
    """Mistral's tokens: the marker, once per embedding, a separator between rows, and an end token."""

    def __init__(self, sizes: RowedImages, token_id: Callable[[str], int]) -> None:
        self._sizes = sizes
        self.marker = sizes.placeholder
        self._break, self._end = token_id("[IMG_BREAK]"), token_id("[IMG_END]")

    def run(self, width: int, height: int) -> ImageRun:
        grid, merge = self._sizes.grid(width, height), self._sizes.merge
        row = (*(self.marker,) * (grid.columns // merge), self._break)
        token_ids = (*(row * (grid.rows // merge))[:-1], self._end)
        return ImageRun(token_ids, 0, len(token_ids) - 2)


class EnclosedTokens(ImageTokens):
    """Gemma 3's tokens: a start token, the placeholders and an end token, with a blank line on both sides.

    The start token is the marker. Blank lines are text, because the tokenizer joins them with line breaks next to them.
    """

    around = ("<start_of_image>", "\n\n")

    def __init__(self, sizes: SquareImages, token_id: Callable[[str], int]) -> None:
        self.marker, end = token_id(self.around[0]), token_id("<end_of_image>")
        count = (sizes.side // sizes.merge) ** 2
        token_ids = (self.marker, *(sizes.placeholder,) * count, end)
        self._run = ImageRun(token_ids, 1, count, is_bidirectional=True)

    def run(self, width: int, height: int) -> ImageRun:
        return self._run


class FilledTokens(ImageTokens):
    """Gemma 4's tokens: a start token, the marker once per embedding, and an end token."""

    def __init__(self, sizes: FilledImages) -> None:
        self._sizes = sizes
        self.marker = sizes.placeholder

    def run(self, width: int, height: int) -> ImageRun:
        count, (start, end) = self._sizes.num_tokens(width, height), self._sizes.enclosing
        token_ids = (start, *(self.marker,) * count, end)
        return ImageRun(token_ids, 1, count, is_bidirectional=self._sizes.is_bidirectional)


class ImagePlaceholders:
    """The layout of prompts with images for one model."""

    def __init__(self, tokens: ImageTokens) -> None:
        self._tokens = tokens

    @classmethod
    def from_checkpoint(cls, folder: Path, added_token_id: Callable[[str], int | None]) -> "ImagePlaceholders | None":
        """Read a checkpoint's configuration; return None if the model does not support images.

        `added_token_id`: method of the checkpoint's Tokenizer. Raises CheckpointError.
        """
        sizes = read_image_sizes(folder)
        if sizes is None:
            return None

        def token_id(text: str) -> int:
            found = added_token_id(text)
            if found is None:
                raise CheckpointError(f"{folder} has no token {text}, which represents images")
            return found

        if isinstance(sizes, RowedImages):
            return cls(RowedTokens(sizes, token_id))
        if isinstance(sizes, SquareImages):
            return cls(EnclosedTokens(sizes, token_id))
        if isinstance(sizes, FilledImages):
            return cls(FilledTokens(sizes))
        return cls(TiledTokens(sizes, token_id) if isinstance(sizes, TiledImages) else PatchedTokens(sizes))

    def num_tokens(self, width: int, height: int) -> int:
        """Return the number of prompt tokens for an image of this size, including separators.

        Raises ImagePromptError for a size that the model does not support.
        """
        return len(self._tokens.run(width, height).token_ids)

    @property
    def around(self) -> tuple[str, str] | None:
        return self._tokens.around

    def expand(
        self, token_ids: Sequence[int], images: Sequence[SizedImage]
    ) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
        """Replace each image's marker in an encoded prompt by the image's tokens.

        Raises ImagePromptError if the numbers of markers and images differ, or a size is not supported.
        """
        found = token_ids.count(self._tokens.marker)
        if found != len(images):
            raise ImagePromptError(
                f"the prompt has {found} image placeholders and {len(images)} images; "
                "the model's chat template has to write one for each image part"
            )
        expanded: list[int] = []
        placed: list[PromptImage] = []
        for token_id in token_ids:
            if token_id != self._tokens.marker:
                expanded.append(token_id)
                continue
            image = images[len(placed)]
            run = self._tokens.run(image.width, image.height)
            position, num_tokens = len(expanded) + run.first, run.last - run.first + 1
            placed.append(
                PromptImage(position, num_tokens, image.digest, image.data, run.columns, run.is_bidirectional)
            )
            expanded += run.token_ids
        return tuple(expanded), tuple(placed)

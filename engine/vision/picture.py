"""Converts an image file to an encoder's input, exactly as the model's processor in `transformers`.

The file is decoded by Pillow, resized, normalized and cut into patches. Runs in any thread. Resizing is the 8-bit resizing of torch, which the
processors call through torchvision.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from pilotlight.engine.description.image_sizes import (
    ColorRule,
    FilledImages,
    ImageSizes,
    PatchedImages,
    RowedImages,
    ScaledImages,
    SquareImages,
    TiledImages,
)
from pilotlight.engine.text.image_file import decoded


class PreparedImage(NamedTuple):
    """An image in pieces that are encoded separately: patches only attend within their piece."""

    pieces: list[
        torch.Tensor
    ]  # patches [rows, columns, 3 * patch_size**2]; a patch has all numbers of the first colour first
    num_tokens: int  # number of embeddings of all pieces


def prepare_image(data: bytes, sizes: ImageSizes) -> PreparedImage:
    """Decode an image file and prepare it for the encoder. Raises ImageError."""
    picture = read_picture(data)
    return _tiles(picture, sizes) if isinstance(sizes, TiledImages) else _patches(picture, sizes)


def read_picture(data: bytes) -> torch.Tensor:
    """Decode a file to [3, height, width] uint8. Raises ImageError.

    Takes the first picture of an animation, and makes transparent parts white.
    """
    width, height, pixels = decoded(data)
    return torch.frombuffer(pixels, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).contiguous()


def _tiles(picture: torch.Tensor, sizes: TiledImages) -> PreparedImage:
    side = sizes.tile_size
    grid = sizes.grid(picture.shape[2], picture.shape[1])
    canvas = picture.new_zeros(3, grid.rows * side, grid.columns * side)
    canvas[:, : grid.height, : grid.width] = _resized(picture, grid.width, grid.height, "bilinear")
    tiles = [tile for row in torch.split(canvas, side, 1) for tile in torch.split(row, side, 2)]
    if len(tiles) > 1:
        tiles.append(_resized(picture, side, side, "bilinear"))
    mean, std = (torch.tensor(numbers, dtype=torch.bfloat16).view(3, 1, 1) for numbers in sizes.colors)
    # Every operation in bf16, like the processor, whatever the model's dtype is.
    colored = [((tile.to(torch.bfloat16) * (1 / 255)) - mean) / std for tile in tiles]
    return PreparedImage([_cut(tile, sizes.patch_size) for tile in colored], len(tiles) * sizes.tile_tokens)


def _patches(
    picture: torch.Tensor, sizes: PatchedImages | ScaledImages | RowedImages | SquareImages | FilledImages
) -> PreparedImage:
    grid = sizes.grid(picture.shape[2], picture.shape[1])
    padded = picture.new_zeros(3, grid.rows * sizes.patch_size, grid.columns * sizes.patch_size)
    mode = "bilinear" if isinstance(sizes, SquareImages) else "bicubic"
    padded[:, : grid.height, : grid.width] = _resized(picture, grid.width, grid.height, mode)
    if isinstance(sizes, FilledImages):
        colored = 2 * (padded.float() * (1 / 255) - 0.5)  # by the processor, then by the model
    else:
        mean, std = _of_bytes(sizes.colors)
        colored = (padded.float() - mean) / std
    patches = _cut(colored, sizes.patch_size)
    return PreparedImage([patches], grid.rows * grid.columns // sizes.merge**2)


def _resized(picture: torch.Tensor, width: int, height: int, mode: str) -> torch.Tensor:
    if picture.shape[1:] == (height, width):
        return picture
    return F.interpolate(picture.unsqueeze(0), (height, width), mode=mode, align_corners=False, antialias=True)[0]


def _of_bytes(colors: ColorRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and standard deviation of colours, for values from 0 to 255."""
    mean, std = (torch.tensor(numbers) * (1.0 / (1 / 255)) for numbers in colors)
    return mean.view(3, 1, 1), std.view(3, 1, 1)


def _cut(pixels: torch.Tensor, patch: int) -> torch.Tensor:
    """Cut pixels [3, height, width] into patches [rows, columns, 3 * patch**2]."""
    rows, columns = pixels.shape[1] // patch, pixels.shape[2] // patch
    return pixels.view(3, rows, patch, columns, patch).permute(1, 3, 0, 2, 4).reshape(rows, columns, -1)

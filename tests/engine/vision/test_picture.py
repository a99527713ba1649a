"""Images are prepared bit by bit as by the processors of `transformers`."""

import hashlib
import io

import pytest
import torch
from PIL import Image

from pilotlight.engine.api.errors import ImageError
from pilotlight.engine.description.image_sizes import (
    FilledImages,
    PatchedImages,
    ScaledImages,
    SquareImages,
    TiledImages,
)
from pilotlight.engine.vision.picture import PreparedImage, prepare_image, read_picture
from tests.engine.pictures import picture

# Width, height and mode of an image of tests.engine.pictures, and results of transformers 5.23 with torchvision 0.28: the hash of the fp32 pixel
# values and the number of tiles from Llama4ImageProcessor, and the hash and the number of patches from Kimi_K25ImageProcessor, both with their
# default settings.
RECORDED = {
    (1, 10000, "L"): ("a78df42e3ae2c49e", 17, "b617ec3cc5fdeb8c", 1024),
    (336, 336, "RGB"): ("1cfad5508ed98490", 1, "02ab38bca3ac3b8d", 576),
    (337, 335, "RGBA"): ("5c0ab8f9cc5879c9", 3, "3a9b56979610e03e", 624),
    (29, 1501, "RGB"): ("5d95e646c27873ea", 6, "a2e3e446a16a2ce4", 432),
    (811, 603, "RGB"): ("d92164501f8663da", 7, "d663fdacacb69613", 2552),
    (7, 3, "RGBA"): ("cca73cc329ee6929", 1, "163bb3f9e1c1bac9", 4),
}
SCOUT = TiledImages(tile_size=336, max_tiles=16, fills_canvas=False, tile_tokens=144, patch_size=14, placeholder=9)
KIMI = PatchedImages(patch_size=14, merge=2, max_patches=16384, max_side=512, placeholder=9)


@pytest.mark.parametrize("seed", range(len(RECORDED)))
def test_an_image_is_prepared_as_the_reference_does(seed: int) -> None:
    (width, height, mode), (tiles_name, num_tiles, patches_name, num_patches) = list(RECORDED.items())[seed]
    file = picture(width, height, seed, mode=mode)
    tiled, patched = prepare_image(file, SCOUT), prepare_image(file, KIMI)
    assert (len(tiled.pieces), tiled.num_tokens) == (num_tiles, num_tiles * 144)
    tiles = [piece.view(24, 24, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 336, 336) for piece in tiled.pieces]
    assert name_of(torch.stack(tiles)) == tiles_name
    [patches] = patched.pieces
    assert (patches.shape[0] * patches.shape[1], patched.num_tokens) == (num_patches, num_patches // 4)
    assert name_of(patches.reshape(-1, 3, 14, 14)) == patches_name


# The same from Qwen2VLImageProcessor with its default settings, which refuses the first size.
SCALED = {
    (336, 336): ("bb460c3a53d8278f", 576),
    (337, 335): ("821488c630c630de", 576),
    (29, 1501): ("f4ac974a289c5541", 216),
    (811, 603): ("55604b4cc73ddef2", 2552),
    (7, 3): ("d928148235c6b52a", 32),
}
QWEN = ScaledImages(patch_size=14, merge=2, least_pixels=56 * 56, most_pixels=28 * 28 * 1280, placeholder=9)


@pytest.mark.parametrize("seed", range(1, len(RECORDED)))
def test_an_image_is_scaled_as_the_reference_does(seed: int) -> None:
    width, height, mode = list(RECORDED)[seed]
    name, num_patches = SCALED[width, height]
    prepared = prepare_image(picture(width, height, seed, mode=mode), QWEN)
    [patches] = prepared.pieces
    assert (patches.shape[0] * patches.shape[1], prepared.num_tokens) == (num_patches, num_patches // 4)
    assert name_of(patches.reshape(-1, 3, 14, 14)) == name


# The hash from Gemma3ImageProcessor with a size of 896 x 896.
SQUARES = (
    "23b9c4ba5c23a35d",
    "6a0c3a898a59e395",
    "5305a0f4f4268c15",
    "2452468aa8e349b4",
    "641d44d077f51ecd",
    "bb0cceb9ab31ebf6",
)
GEMMA = SquareImages(patch_size=14, merge=4, side=64, placeholder=9)


@pytest.mark.parametrize("seed", range(len(RECORDED)))
def test_an_image_is_made_square_as_the_reference_does(seed: int) -> None:
    width, height, mode = list(RECORDED)[seed]
    prepared = prepare_image(picture(width, height, seed, mode=mode), GEMMA)
    [patches] = prepared.pieces
    assert (patches.shape[:2], prepared.num_tokens) == ((64, 64), 256)
    assert name_of(patches.view(64, 64, 3, 14, 14).permute(2, 0, 3, 1, 4).reshape(3, 896, 896)) == SQUARES[seed]


# The same from Gemma4ImageProcessor with its default settings, after the model's scaling of colours, and the number of embeddings.
FILLED = (
    ("a47b44717d377547", 280), ("182d721e078715f1", 256), ("682154fe7dc6655e", 256), ("2273b3c74a29ab05", 240), ("daf8cd6e0a8e8fc6", 266),
    ("5aa2f961670c2833", 250),
)  # fmt: skip
GEMMA_4 = FilledImages(patch_size=16, merge=3, most_tokens=280, placeholder=9, enclosing=(5, 6), is_bidirectional=True)


@pytest.mark.parametrize("seed", range(len(RECORDED)))
def test_an_image_fills_its_embeddings_as_the_reference_does(seed: int) -> None:
    width, height, mode = list(RECORDED)[seed]
    prepared = prepare_image(picture(width, height, seed, mode=mode), GEMMA_4)
    [patches] = prepared.pieces
    by_pixel = patches.view(-1, 3, 256).transpose(1, 2).reshape(-1, 768)
    assert (name_of(by_pixel), prepared.num_tokens, len(by_pixel)) == (*FILLED[seed], 9 * prepared.num_tokens)


@pytest.mark.long
def test_as_many_tokens_are_laid_out_as_embeddings_are_made() -> None:
    generator = torch.Generator().manual_seed(3)
    for width, height in torch.randint(1, 700, (40, 2), generator=generator).tolist():
        file = picture(width, height)
        assert prepare_image(file, SCOUT).num_tokens == SCOUT.grid(width, height).num_tiles * 144
        assert prepare_image(file, KIMI).num_tokens == KIMI.num_tokens(width, height)
        assert prepare_image(file, QWEN).num_tokens == QWEN.num_tokens(width, height)


def test_of_an_animation_the_first_picture_counts() -> None:
    frames = [Image.new("RGB", (9, 7), color) for color in ("red", "blue")]
    file = io.BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    red, _, blue = read_picture(file.getvalue())[:, 3, 4].tolist()
    assert (red > 250, blue) == (True, 0)


def test_more_pixels_than_are_decoded_are_refused_before_they_are() -> None:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    assert len(file.getvalue()) < 100_000
    with pytest.raises(ImageError, match="9000 x 9000 pixels"):
        prepare_image(file.getvalue(), SCOUT)


@pytest.mark.long
def test_a_bomb_is_refused() -> None:
    file = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(file, "PNG")
    with pytest.raises(ImageError, match="cannot be read"):
        prepare_image(file.getvalue(), SCOUT)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP"])
def test_a_file_cut_anywhere_is_refused_or_read_and_nothing_else(kind: str) -> None:
    file = picture(40, 30, kind=kind)
    for end in range(0, len(file) - 40, max(1, len(file) // 17)):
        try:
            found: PreparedImage | None = prepare_image(file[:end], SCOUT)
        except ImageError:
            found = None
        assert found is None or found.num_tokens == 144


def name_of(pixels: torch.Tensor) -> str:
    return hashlib.sha256(pixels.float().contiguous().numpy().tobytes()).hexdigest()[:16]

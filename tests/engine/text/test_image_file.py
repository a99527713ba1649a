"""Image files are decoded as a person sees them."""

import base64
import io

import pytest
from PIL import ExifTags, Image

from pilotlight.engine.text.image_file import check_image, decoded

# For each orientation of EXIF, how a camera stores an upright picture.
STORED = {
    1: None, 2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_90, 7: Image.Transpose.TRANSVERSE, 8: Image.Transpose.ROTATE_270,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
@pytest.mark.parametrize("orientation", STORED)
def test_a_picture_that_its_camera_has_stored_turned_is_put_upright(orientation: int, mode: str) -> None:
    upright = Image.effect_noise((29, 18), 60).convert(mode)
    way, exif, file = STORED[orientation], Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    (upright if way is None else upright.transpose(way)).save(file, "PNG", exif=exif)
    assert decoded(file.getvalue()) == (29, 18, upright.convert("RGB").tobytes())
    assert check_image(base64.b64encode(file.getvalue()).decode(), 29 * 18) == (29, 18)


def test_grey_of_16_bits_keeps_its_shades() -> None:
    shades = [0, 255, 256, 20_000, 40_000, 65_535]
    file = io.BytesIO()
    Image.frombytes("I;16", (3, 2), b"".join(shade.to_bytes(2, "little") for shade in shades)).save(file, "PNG")
    assert decoded(file.getvalue()) == (3, 2, bytes([shade >> 8 for shade in shades for _ in range(3)]))

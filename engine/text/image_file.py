"""Reads the size and the pixels of image files with Pillow. Independent of how encoders use them."""

import io
from base64 import b64decode
from typing import TYPE_CHECKING

from pilotlight.engine.api.errors import ImageError
from pilotlight.engine.text.image_prompt import IMAGE_FORMATS, MOST_PIXELS

if TYPE_CHECKING:
    from PIL import Image


def check_image(encoded: str, most_pixels: int) -> tuple[int, int]:
    """Return the size of a base64-encoded file, upright; decode it unless it has too many pixels.

    To be called in a child process, because native decoders may crash. Raises ImageError.
    """
    data = b64decode(encoded)
    width, height = size_of(data)
    if width * height <= most_pixels:
        width, height, _ = decoded(data)
    return width, height


def size_of(data: bytes) -> tuple[int, int]:
    """Return (width, height) from a file's header. Raises ImageError if it is not an image, or animated."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            size, is_still = image.size, image.format == "MPO" or not getattr(image, "is_animated", False)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError("has far too many pixels") from None
    except UnidentifiedImageError:
        raise ImageError(
            f"is not in {', '.join(IMAGE_FORMATS[:-1])} or {IMAGE_FORMATS[-1]} format, or it is broken"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # Pillow's readers may raise anything for a broken file
        raise ImageError(f"cannot be read: {error}") from None
    if not is_still:
        raise ImageError("is animated: send a single picture")
    if not all(size):
        raise ImageError("has no pixels")
    return size


def decoded(data: bytes) -> tuple[int, int, bytearray]:
    """Return (width, height, pixels) of the first picture; pixels are [height, width, 3] bytes.

    A picture that its camera has stored turned or mirrored is put upright, and a transparent one on white. Raises ImageError.
    """
    from PIL import Image, ImageOps  # imported here because few models read images

    try:
        with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ImageError(f"has {width} x {height} pixels; at most {MOST_PIXELS} are decoded")
            ImageOps.exif_transpose(image, in_place=True)
            return *image.size, bytearray(_opaque(image).tobytes())
    except (ImageError, MemoryError):
        raise
    except Exception as error:  # a decoder may raise anything for a broken file
        raise ImageError(f"cannot be read as {', '.join(IMAGE_FORMATS)}: {error}") from error


def _opaque(image: "Image.Image") -> "Image.Image":
    if image.mode.startswith("I;16"):  # 16 bits of grey, which Pillow's conversion would cut off at 255
        return image.point(lambda value: value * (1 / 256)).convert("L").convert("RGB")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        from PIL import Image

        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")

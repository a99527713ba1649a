"""Images in messages: the form of each dialect is converted to an ImagePart.

This module checks shapes only: runtime/generation/images.py fetches URLs and decodes files.
"""

from base64 import b64encode
from collections.abc import Iterable
from typing import Any

from msgspec import Struct

from pilotlight.dialects.body.invalid_values import ValidationError

ROLES = ("user", "tool")  # roles whose messages may have images
_NO_URL = "must be an https: URL, or a data: URL such as data:image/png;base64,..."


class ImagePart(Struct, frozen=True):
    """An image among the parts of a message."""

    url: str  # https: or data:


Content = list[str | ImagePart]  # content of a message with images: its texts and images in order


def image_at(url: Any) -> ImagePart:
    """Return the image with an https: or data: URL. Raises ValidationError."""
    if not isinstance(url, str) or not url[:8].lower().startswith(("data:", "https://")):
        raise ValidationError(_NO_URL)
    return ImagePart(url)


def image_of_base64(data: Any) -> ImagePart:
    """Return an image whose file was sent as base64.

    Its type is taken from the file's header, not from the body."""
    if not isinstance(data, str) or not data:
        raise ValidationError("must be the file's bytes as base64")
    return ImagePart(f"data:;base64,{data}")


def read_image(value: Any) -> Any:
    """Convert Workers AI's `image`, a list of bytes, base64 or a URL, to an ImagePart."""
    if isinstance(value, ImagePart):
        return value
    if isinstance(value, list):
        try:
            return image_of_base64(b64encode(bytes(value)).decode())
        except (ValueError, TypeError):
            raise ValidationError("must be a list of the file's bytes, from 0 to 255, or a string") from None
    if isinstance(value, str) and ":" in value[:8]:  # base64 has no colon
        return image_at(value)
    return image_of_base64(value)


def joined(pieces: Iterable[str | ImagePart], separator: str = "\n") -> str | Content:
    """Return a message's content: a list if it has images, else one string, which many templates expect."""
    content = list(pieces)
    texts = [piece for piece in content if isinstance(piece, str)]
    return separator.join(texts) if len(texts) == len(content) else content

"""Limits of images in requests. How an image is read is decided elsewhere."""

from typing import Annotated, ClassVar

from msgspec import Meta

from pilotlight.sites.config import Count, Positive
from pilotlight.sites.rules import are_host_names
from pilotlight.sites.table import Rules, Table


class ImagesConfig(Table, frozen=True, kw_only=True):
    """Limits of images in requests.
    The whole body, with images in base64, must fit in limits.max_body_mib."""

    rules: ClassVar[Rules] = {"allowed_hosts": are_host_names}

    max_per_request: Count = 16
    """Images in one request."""
    max_mib: Positive = 8.0
    """Size of one image file."""
    max_megapixels: Annotated[float, Meta(gt=0, le=64)] = 50.0
    """Pixels of one image, in millions."""
    allowed_hosts: tuple[str, ...] = ()
    """Hosts from which https: URLs of images are fetched, if their addresses are public; empty: only data: URLs are accepted."""

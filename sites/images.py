"""What a site takes of images in requests. Refuses to know models, and how an image is read."""

from typing import Annotated, ClassVar

from msgspec import Meta

from pilotlight.sites.config import Count, Positive
from pilotlight.sites.rules import are_host_names
from pilotlight.sites.table import Rules, Table


class ImagesConfig(Table, frozen=True, kw_only=True):
    """Images in requests, of models that take any. A request's body, its images' base64 included, stays within limits.max_body_mib."""

    rules: ClassVar[Rules] = {"allowed_hosts": are_host_names}

    max_per_request: Count = 16
    max_mib: Annotated[Positive, Meta(description="of one image's file")] = 8.0
    max_megapixels: Annotated[float, Meta(gt=0, le=64, description="of one image")] = 50.0
    allowed_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="from which https: URLs of images are fetched, where their addresses are public; none: images come in data: URLs alone"
        ),
    ] = ()

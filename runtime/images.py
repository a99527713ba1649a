"""Images of requests: what their URLs hold is fetched or decoded, and their headers say whether a model may be given them.

No pixel is decoded here: formats, sizes and animation stand in the header, and a file that is broken behind it is refused by the engine. Whatever
is wrong is the client's to mend, so it is a 400 that says which image it was.
"""

import asyncio
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from io import BytesIO

from dialects.images import ImagePart
from engine.image_prompt import IMAGE_FORMATS, SizedImage
from runtime.image_fetching import FETCH_S, BadImageError, ImageFetcher
from sites.images import ImagesConfig
from wire.errors import ApiError

MOST_STRETCHED = 200  # times as long as wide, as the processors of Qwen's models have it
THREADS = 2  # each holds a file, its base64 and what Pillow reads of its header
MIB = 1 << 20

Fetch = Callable[[str, int], Awaitable[bytes]]  # (URL, most bytes) -> a file


class ImageReader:
    """A site's reader of images. One for all requests: it bounds what is in hand at once."""

    def __init__(self, config: ImagesConfig, max_body_mib: float, fetch: Fetch | None = None) -> None:
        """`max_body_mib`: what is fetched for a request is no more than its body could have held."""
        self._config = config
        self._most_fetched = int(max_body_mib * MIB)
        self._fetch = fetch or ImageFetcher(config.allowed_hosts).fetch
        self._threads = asyncio.Semaphore(THREADS)

    async def read(self, parts: Sequence[ImagePart], field: str) -> tuple[SizedImage, ...]:
        """Read a request's images. `field`: the request's name for its prompt. Raises ApiError."""
        most = self._config.max_per_request
        if len(parts) > most:
            message = f"{field}: {len(parts)} images are more than the {most} that this site takes in one request"
            raise ApiError("invalid_request", message, param=field)
        images: list[SizedImage] = []
        left = self._most_fetched
        deadline = asyncio.get_running_loop().time() + FETCH_S
        for i, part in enumerate(parts):
            try:
                if part.url[:5].lower() == "data:":
                    images.append(await self._in_thread(self._decoded, part.url))
                else:
                    data = await self._fetched(part.url, left, deadline)
                    left -= len(data)
                    images.append(await self._in_thread(self._sized, data))
            except BadImageError as error:
                message = f"{field}: image {i + 1} of {len(parts)} {error}"
                raise ApiError("invalid_request", message, param=field) from None
        return tuple(images)

    async def _fetched(self, url: str, left: int, deadline: float) -> bytes:
        try:
            async with asyncio.timeout_at(deadline):
                return await self._fetch(url, min(left, self._most_bytes))
        except TimeoutError:
            raise BadImageError(f"was not there after {FETCH_S:g} s") from None

    async def _in_thread(
        self, work: Callable[[str], SizedImage] | Callable[[bytes], SizedImage], given: str | bytes
    ) -> SizedImage:
        async with self._threads:
            return await asyncio.to_thread(work, given)  # type: ignore[arg-type]

    @property
    def _most_bytes(self) -> int:
        return int(self._config.max_mib * MIB)

    def _decoded(self, url: str) -> SizedImage:
        """Read a data: URL."""
        head, comma, _ = url[:200].partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise BadImageError("is no data: URL with base64, such as data:image/png;base64,...")
        start = len(head) + 1
        if (len(url) - start) * 3 // 4 > self._most_bytes + 2:
            raise _too_large(self._config.max_mib)
        try:
            data = b64decode(url[start:], validate=True)
        except ValueError as error:
            raise BadImageError(f"is no base64: {error}") from None
        return self._sized(data)

    def _sized(self, data: bytes) -> SizedImage:
        if len(data) > self._most_bytes:
            raise _too_large(self._config.max_mib)
        width, height = size_of(data)
        if width * height > self._config.max_megapixels * 1e6:
            raise BadImageError(
                f"has {width} x {height} pixels, more than the {self._config.max_megapixels:g} million that are taken"
            )
        if max(width, height) > MOST_STRETCHED * min(width, height):
            raise BadImageError(
                f"has {width} x {height} pixels: one side may be at most {MOST_STRETCHED} times the other"
            )
        return SizedImage(width, height, sha256(data).digest(), data)


def size_of(data: bytes) -> tuple[int, int]:
    """Return the width and height that a file's header tells. Raises BadImageError for what is no image, or one that moves."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(BytesIO(data), formats=IMAGE_FORMATS) as image:
            size, is_still = image.size, image.format == "MPO" or not getattr(image, "is_animated", False)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadImageError("has far too many pixels") from None
    except UnidentifiedImageError:
        raise BadImageError(
            f"is none of {', '.join(IMAGE_FORMATS[:-1])} and {IMAGE_FORMATS[-1]}, or it is broken"
        ) from None
    except Exception as error:  # whatever else a reader of files finds wrong with one
        raise BadImageError(f"cannot be read: {error}") from None
    if not is_still:
        raise BadImageError("is animated: send one of its pictures")
    if not all(size):
        raise BadImageError("has no pixels")
    return size


def _too_large(max_mib: float) -> BadImageError:
    return BadImageError(f"is larger than the {max_mib:g} MiB that are taken")

"""Images of requests: fetch or decode their URLs, and check them in a child process.

A decoder is native code. So a client's image is first decoded completely in the child, and the engine host decodes only images that passed. Every
error is the client's: a 400 that names the image.
"""

import asyncio
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import sha256
from typing import Any

from pilotlight.dialects.body.images import ImagePart
from pilotlight.engine.api.guarded_pool import GuardedJob, JobCall, JobEndedError, JobError
from pilotlight.engine.text.image_file import check_image
from pilotlight.engine.text.image_prompt import SizedImage
from pilotlight.runtime.generation.image_fetching import FETCH_S, BadImageError, ImageFetcher
from pilotlight.runtime.models.checkpoint_children import run_guarded
from pilotlight.sites.site import ImagesConfig
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.errors import ApiError

MOST_STRETCHED = 200  # maximum ratio of the longer to the shorter side, as in Qwen's image processors
AT_ONCE = 2  # images decoded at the same time: each needs its file and base64 in this process and in a child
CPU_S, BYTES = 10.0, 2 << 30  # limits of CPU time and memory of one image; 64 Mpixel with transparency take 1.2 GB
MIB = 1 << 20

Fetch = Callable[[str, int], Awaitable[bytes]]  # called with the URL and the limit of bytes; returns the file
Run = Callable[[GuardedJob], Coroutine[Any, Any, Any]]


class ImageReader:
    """A site's reader of images. It limits the images that are read at once, over all requests."""

    def __init__(
        self,
        config: ImagesConfig,
        max_body_mib: float,
        fetch: Fetch | None = None,
        run: Run = run_guarded,
        *,
        fetch_s: float = FETCH_S,
        child_bytes: int = BYTES,
    ) -> None:
        """`max_body_mib` also limits the bytes that are fetched for a request, all within `fetch_s`.

        `run` runs a check in a child, and `child_bytes` limits its memory."""
        self._fetch_s, self._child_bytes = fetch_s, child_bytes
        self._config = config
        self._most_fetched = int(max_body_mib * MIB)
        self._fetch = fetch or ImageFetcher(config.allowed_hosts).fetch
        self._run = run
        self._places = asyncio.Semaphore(AT_ONCE)

    async def read(self, parts: Sequence[ImagePart], field: str) -> tuple[SizedImage, ...]:
        """Read a request's images. Raises ApiError.
        `field` is the request's name for its prompt."""
        most = self._config.max_per_request
        if len(parts) > most:
            message = f"{field}: {len(parts)} images are more than the {most} that this site takes in one request"
            raise ApiError("invalid_request", message, param=field)
        images: list[SizedImage] = []
        left = self._most_fetched
        left_s = self._fetch_s
        for i, part in enumerate(parts):
            try:
                if part.url[:5].lower() == "data:":
                    data = await asyncio.to_thread(self._decoded, part.url)
                else:
                    began = time.monotonic()
                    data = await self._fetched(part.url, left, left_s)
                    left, left_s = left - len(data), left_s - (time.monotonic() - began)
                images.append(await self._sized(data))
            except BadImageError as error:
                message = f"{field}: image {i + 1} of {len(parts)} {error}"
                raise ApiError("invalid_request", message, param=field) from None
        return tuple(images)

    async def _fetched(self, url: str, left: int, left_s: float) -> bytes:
        try:
            async with TimeLimit(left_s):
                return await self._fetch(url, min(left, self._most_bytes))
        except TimeoutError:
            raise BadImageError(f"did not arrive within {self._fetch_s:g} s") from None

    @property
    def _most_bytes(self) -> int:
        return int(self._config.max_mib * MIB)

    def _decoded(self, url: str) -> bytes:
        """Return the file in a data: URL."""
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
        return data

    async def _sized(self, data: bytes) -> SizedImage:
        if len(data) > self._most_bytes:
            raise _too_large(self._config.max_mib)
        most_pixels = int(self._config.max_megapixels * 1e6)
        try:
            width, height = await self._checked(data, most_pixels)
        except JobError as error:
            raise BadImageError(str(error)) from None
        except JobEndedError as error:
            raise BadImageError(f"cannot be read: {error}") from None
        if width * height > most_pixels:
            raise BadImageError(
                f"has {width} x {height} pixels, more than the {self._config.max_megapixels:g} million that are taken"
            )
        if max(width, height) > MOST_STRETCHED * min(width, height):
            raise BadImageError(
                f"has {width} x {height} pixels: one side may be at most {MOST_STRETCHED} times the other"
            )
        return SizedImage(width, height, sha256(data).digest(), data)

    async def _checked(self, data: bytes, most_pixels: int) -> tuple[int, int]:
        """Decode a file in a child, and return its size.

        A child cannot be interrupted, so the check keeps its place until the child has finished, even if the caller is cancelled."""
        await self._places.acquire()
        call = JobCall(check_image, (b64encode(data).decode("ascii"), most_pixels))
        checking = asyncio.create_task(self._run(GuardedJob(call, CPU_S, self._child_bytes)))
        checking.add_done_callback(self._free_place)
        width, height = await asyncio.shield(checking)
        return width, height

    def _free_place(self, checking: "asyncio.Task[Any]") -> None:
        self._places.release()
        if not checking.cancelled():
            checking.exception()  # otherwise asyncio logs the error of a check whose caller was cancelled


def _too_large(max_mib: float) -> BadImageError:
    return BadImageError(f"is larger than the {max_mib:g} MiB that are taken")

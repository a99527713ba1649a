"""Images at https: URLs, fetched from allowed hosts with public addresses.

The site's file lists the hosts. Their addresses are checked by the policy for functions' requests (functions/host/network/egress.py). Each redirect
is checked in the same way.
"""

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

if TYPE_CHECKING:
    from pilotlight.functions.channel.exchanges import StreamingReply
    from pilotlight.functions.host.network.egress import Egress

FETCH_S = 10.0  # time limit of all images of a request together
MAX_REDIRECTS = 5


class BadImageError(Exception):
    """An image is refused. The message completes the sentence "image 1 of 2 ..."."""


class ImageFetcher:
    def __init__(self, allowed_hosts: Collection[str], open_egress: "Callable[[], Egress] | None" = None) -> None:
        """Allow these hosts. `open_egress` opens the connections; the default allows public addresses only."""
        self._allowed = frozenset(host.lower() for host in allowed_hosts)
        self._open_egress = open_egress or _public_egress

    async def fetch(self, url: str, most_bytes: int) -> bytes:
        """Return the file at a URL. Raises BadImageError. The caller limits the time."""
        from pilotlight.functions.channel import frames
        from pilotlight.functions.channel.failure import Failure

        self._check_host(url)
        try:
            async with self._open_egress() as egress:
                for _ in range(MAX_REDIRECTS + 1):
                    frame = frames.FetchEvent(0, "GET", url, [("accept", "image/*")], options={"redirect": "manual"})
                    answer = await egress.fetch(frame, None)
                    location = dict(answer.value["headers"]).get("location")
                    if answer.value["status"] // 100 != 3 or location is None:
                        return await _read(answer, most_bytes)
                    try:
                        url = urljoin(url, location)
                    except ValueError:
                        raise BadImageError("has an invalid URL") from None
                    self._check_host(url)
        except Failure as failure:
            if failure.code == "egress_denied":
                raise BadImageError("leads to an address that is not public") from None
            raise BadImageError(f"could not be fetched from {urlsplit(url).hostname}") from None
        raise BadImageError(f"was redirected more than {MAX_REDIRECTS} times")

    def _check_host(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            scheme, host = parts.scheme, parts.hostname or ""
        except ValueError:
            raise BadImageError("has an invalid URL") from None
        if scheme != "https":
            raise BadImageError("leads to a URL that is not https:")
        if not self._allowed:
            raise BadImageError(
                "is a URL, but this site fetches no images (images.allowed_hosts is empty): send it as a data: URL"
            )
        if host not in self._allowed:
            raise BadImageError(
                f"is at {host[:100]!r}, which is not in images.allowed_hosts of this site's file: send it as a data: URL"
            )


def _public_egress() -> "Egress":
    from pilotlight.functions.host.network.egress import Egress

    return Egress()


async def _read(answer: "StreamingReply", most_bytes: int) -> bytes:
    """Return a response's body.
    Raises BadImageError for a status other than 200, and as soon as more than `most_bytes` have arrived."""
    if answer.value["status"] != 200:
        raise BadImageError(f"could not be fetched: its host answered {answer.value['status']}")
    data = bytearray()
    assert answer.body is not None
    async for chunk in answer.body:
        data += chunk
        if len(data) > most_bytes:
            raise BadImageError(f"is larger than the {most_bytes / (1 << 20):.3g} MiB that are left for it")
    return bytes(data)

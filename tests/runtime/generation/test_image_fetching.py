"""Addresses from which images may be fetched, and redirects to other addresses."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.exchanges import StreamingReply
from pilotlight.runtime.generation.image_fetching import BadImageError, ImageFetcher


class World:
    """A fake egress with a response for each URL: (status, location or body)."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    async def __aenter__(self) -> "World":
        return self

    async def __aexit__(self, *_: object) -> None:
        return

    async def fetch(self, frame: frames.FetchEvent, body: object) -> StreamingReply:
        assert frame.options == {"redirect": "manual"}, "each redirect is checked before it is followed"
        self.asked.append(frame.url)
        status, told = self.answers[frame.url.rpartition("/")[2]]
        headers = [["location", told]] if isinstance(told, str) else []
        return StreamingReply({"status": status, "headers": headers}, _chunks(told if isinstance(told, bytes) else b""))


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(data), 4):
        yield data[start : start + 4]


def fetcher(world: World) -> ImageFetcher:
    opened: Callable[[], Any] = lambda: world  # noqa: E731
    return ImageFetcher(("Images.example", "cdn.example"), opened)


async def test_a_file_is_fetched_through_redirects_within_the_allowed_hosts() -> None:
    world = World(a=(302, "https://cdn.example/b"), b=(301, "/c"), c=(200, b"0123456789"))
    assert await fetcher(world).fetch("https://images.example/a", 10) == b"0123456789"
    assert world.asked == ["https://images.example/a", "https://cdn.example/b", "https://cdn.example/c"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("https://other.example/a", "'other.example', which is not in images.allowed_hosts"),
        ("https://images.example.evil.example/a", "which is not in images.allowed_hosts"),
        ("https://images.example@evil.example/a", "'evil.example'"),
        ("https://images.example/away", "'evil.example'"),
        ("https://images.example/plain", "not https:"),
        ("https://images.example/circle", "redirected more than 5 times"),
        ("https://images.example/large", "is larger than"),
        ("https://images.example/gone", "its host answered 404"),
        ("https://[", "has an invalid URL"),
        ("https://images.example/nowhere", "has an invalid URL"),
    ],
)
async def test_what_leads_elsewhere_or_is_too_large_is_refused(url: str, words: str) -> None:
    world = World(
        nowhere=(302, "https://["),
        away=(302, "https://evil.example/a"), plain=(302, "http://images.example/a"), circle=(302, "circle"), large=(200, b"0" * 11), gone=(404, b"")
    )  # fmt: skip
    with pytest.raises(BadImageError, match=words.replace("(", r"\(")):
        await fetcher(world).fetch(url, 10)


@pytest.mark.process
@pytest.mark.parametrize(
    "host",
    ["localhost", "127.0.0.1", "127.1", "2130706433", "169.254.169.254", "10.0.0.1", "::1", "::ffff:169.254.169.254"],
)
async def test_private_addresses_are_refused_though_their_names_are_allowed(host: str) -> None:
    place = f"[{host}]" if ":" in host else host
    with pytest.raises(BadImageError, match="leads to an address that is not public"):
        await ImageFetcher((host,)).fetch(f"https://{place}/latest/meta-data", 10)

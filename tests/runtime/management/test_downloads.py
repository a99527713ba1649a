"""Downloads that an operator has started."""

import asyncio

import pytest

from pilotlight.runtime.fetching.errors import Progress
from pilotlight.runtime.management.downloads import MAX_RUNNING, Downloads
from pilotlight.runtime.models.sources import SourceError
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.management import Download
from tests.asgi import eventually


class Server:
    """A fake download of ten bytes: it reports three, and waits until a test lets it end or fail."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def fetch(self, source: str, on_progress: Progress) -> None:
        on_progress(3, 10)
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        on_progress(10, 10)


async def test_a_download_is_followed_to_its_end() -> None:
    server, done = Server(), list[str]()
    downloads = Downloads(server.fetch, done.append)
    downloads.start("org/one")
    with pytest.raises(ApiError, match="already"):
        downloads.start("org/one")
    await eventually(lambda: downloads.statuses() == (Download("org/one", "running", 3, 10),))
    server.gate.set()
    await eventually(lambda: downloads.statuses() == (Download("org/one", "done", 10, 10),))
    assert done == ["org/one"]


@pytest.mark.parametrize("error", [SourceError("the hub cannot be reached"), OSError("the hub cannot be reached")])
async def test_one_that_fails_says_why_and_may_be_started_again(error: Exception) -> None:
    server = Server()
    downloads = Downloads(server.fetch, lambda source: None)
    server.error = error
    server.gate.set()
    downloads.start("org/one")
    await eventually(lambda: downloads.statuses()[0].state == "failed")
    assert downloads.statuses()[0].error == "the hub cannot be reached"
    server.error = None
    downloads.start("org/one")
    await eventually(lambda: downloads.statuses()[0].state == "done")


async def test_a_cancelled_one_makes_room_and_the_rest_end_with_the_site() -> None:
    server = Server()
    downloads = Downloads(server.fetch, lambda source: None)
    for i in range(MAX_RUNNING):
        downloads.start(f"org/{i}")
    with pytest.raises(ApiError, match="in progress: wait"):
        downloads.start("org/more")
    await asyncio.sleep(0)
    downloads.cancel("org/0")
    await eventually(lambda: downloads.statuses()[0].state == "cancelled")
    downloads.start("org/more")
    await downloads.close()
    with pytest.raises(ApiError, match="not being downloaded"):
        downloads.cancel("org/1")

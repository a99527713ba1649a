"""Control requests of this router to its sites, signed like any hop."""

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

import aiohttp

from pilotlight.edge_router.backends.site_clocks import SiteClocks
from pilotlight.edge_router.backends.site_sessions import reason_of
from pilotlight.edge_router.requests.request import aside_if_large
from pilotlight.support.time_limits import TimeLimit
from pilotlight.wire.hop.headers import CLOCK, HOP, REFUSAL, REQUEST_ID, Hop, sign_hop

TIMEOUT_S = 2.0
MAX_ANSWER = 1 << 20


class SiteAnswer(NamedTuple):
    status: int  # HTTP status; 0 without an answer
    body: bytes  # the answer's body, or why there is none


UNTRUSTED = SiteAnswer(403, b"it refuses this router's time, by whichever clock it was signed")


class SiteControl:
    """Sends control requests inside `with orders.by(session)`."""

    def __init__(self, urls: Mapping[str, str], secret: str | None, clocks: SiteClocks) -> None:
        """`urls` maps names of sites to their URLs."""
        self._session: aiohttp.ClientSession | None = None
        self._urls = urls
        self.secret, self._clocks = secret or "", clocks

    @contextmanager
    def by(self, session: aiohttp.ClientSession) -> Iterator[None]:
        self._session = session
        try:
            yield
        finally:
            self._session = None

    def knows(self, site: str) -> bool:
        return site in self._urls

    async def exchange(
        self,
        method: str,
        site: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        most_bytes: int = MAX_ANSWER,
    ) -> SiteAnswer:
        """Send a request and return the answer, cut soon after `most_bytes`.
        Without an answer its status is 0 and its body the reason. A large body is signed in a thread."""
        named = {"content-type": "application/json", **(headers or {})}
        try:
            async with TimeLimit(timeout_s):
                answer = await self._ask(method, site, path, body, named, most_bytes)
                return answer or await self._ask(method, site, path, body, named, most_bytes) or UNTRUSTED
        except TimeoutError:
            return SiteAnswer(0, f"no answer within {timeout_s:g} s".encode())
        except (aiohttp.ClientError, OSError) as error:
            return SiteAnswer(0, reason_of(error).encode())

    async def _ask(
        self, method: str, site: str, path: str, body: bytes, headers: Mapping[str, str], most_bytes: int
    ) -> SiteAnswer | None:
        """Return the answer; None if the site refused the signature's time and its own time is known now."""
        assert self._session is not None
        named = {**headers, REQUEST_ID: (request_id := uuid.uuid4().hex)}
        if self.secret:
            hop = Hop(method, path, request_id, site)
            named[HOP] = await aside_if_large(body, sign_hop, self.secret, self._clocks.now_s(site), hop, body)
        async with self._session.request(method, self._urls[site] + path, data=BytesIO(body), headers=named) as answer:
            refusal, clock = answer.headers.get(REFUSAL, ""), answer.headers.get(CLOCK, "")
            if refusal and self._clocks.learns(refusal, clock, self.secret, site, request_id):
                return None
            told = bytearray()
            while len(told) < most_bytes and (part := await answer.content.read(1 << 20)):
                told += part
            return SiteAnswer(answer.status, bytes(told))

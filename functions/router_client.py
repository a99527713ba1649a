"""The site's client for its router: deployed functions, and models that this site does not have."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

import aiohttp
from yarl import URL

from pilotlight.wire.hop.bundles import MAX_BYTES
from pilotlight.wire.hop.headers import FOR_ROUTERS, HOP, REQUEST_ID, Hop, sign_hop
from pilotlight.wire.http.certificate import client_context

TIMEOUT_S = 60.0
CONNECT_S = 5.0


class RouterClient:
    def __init__(self, url: str, key: str, authority: str | None = None) -> None:
        """`key`, the secret that this site shares with its routers, signs requests; empty for no signature.
        `authority` is the file with the network's own CA certificate, if it has one."""
        self._authority = authority
        self.url = url
        self.key = key
        self._session: aiohttp.ClientSession | None = None

    async def get(self, path: str) -> bytes:
        """Return the body of a GET.
        Raises aiohttp.ClientError (also for a status other than 200), OSError and TimeoutError."""
        async with self.ask("GET", path, timeout_s=TIMEOUT_S) as answer:
            if answer.status != 200:
                text = (await answer.content.read(2000)).decode(errors="replace")
                raise aiohttp.ClientError(f"{answer.status} {text}")
            return await whole(answer)

    @asynccontextmanager
    async def ask(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a signed request; return a scope with the response, whose body is not read yet.
        `path` is signed as given, and encoded in the URL. Raises aiohttp.ClientError, OSError and TimeoutError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context(self._authority)))
        hop = Hop(method, path, uuid.uuid4().hex, FOR_ROUTERS)
        named = {**(headers or {}), REQUEST_ID: hop.request_id}
        if self.key:
            named[HOP] = sign_hop(self.key, time.time(), hop, body)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        url = URL(self.url + quote(path), encoded=True)
        async with self._session.request(method, url, data=body or None, headers=named, timeout=timeout) as answer:
            yield answer

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


async def whole(answer: aiohttp.ClientResponse) -> bytes:
    """Return a response's whole body. Raises aiohttp.ClientError, OSError and TimeoutError."""
    data = bytearray()
    async for chunk in answer.content.iter_any():
        data += chunk
        if len(data) > MAX_BYTES:
            raise aiohttp.ClientError("the answer is too large")
    return bytes(data)

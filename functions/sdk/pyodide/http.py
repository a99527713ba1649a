"""Pyodide's `pyfetch` and `open_url`, built on `workers.fetch`.

See https://pyodide.org/en/stable/usage/api/python-api/http.html.
"""

import io
import json
from typing import Any

from pilotlight.functions.channel.failure import Failure
from workers.host import run_sync
from workers.http.body import BodyUsedError as BodyUsedError
from workers.http.outbound import fetch
from workers.http.response import Response


class HttpStatusError(OSError):
    def __init__(self, status: int, status_text: str, url: str) -> None:
        super().__init__(f"{status} {status_text} for url: {url}")
        self.status, self.status_text, self.url = status, status_text, url


class FetchedResponse:
    """The result of `pyfetch`: a response whose body methods have Pyodide's names."""

    def __init__(self, url: str, response: Response) -> None:
        self.js_response = response
        self.url = response.url or url
        self.status, self.status_text, self.ok = response.status, response.status_text, response.ok
        self.headers = dict(response.headers.multi_items())
        self.redirected = response.redirected
        self.text = self.string = response.text
        self.bytes = response.bytes

    @property
    def body_used(self) -> bool:
        return self.js_response.body_used

    async def json(self, **options: Any) -> Any:
        return json.loads(await self.bytes(), **options)

    async def memoryview(self) -> Any:
        return memoryview(await self.bytes())

    buffer = memoryview

    def raise_for_status(self) -> None:
        if self.status >= 400:
            raise HttpStatusError(self.status, self.status_text, self.url)


async def pyfetch(url: str, **options: Any) -> FetchedResponse:
    """Fetch a URL; `options` are those of JavaScript's fetch. Raises OSError if the request fails."""
    try:
        return FetchedResponse(url, await fetch(url, **options))
    except Failure as failure:
        raise OSError(failure.message) from None


def open_url(url: str) -> io.StringIO:
    return io.StringIO(run_sync(run_sync(fetch(url)).text()))

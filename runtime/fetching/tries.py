"""Requests to a web server with retries: which failures are retried, and how errors are described."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp

from pilotlight.runtime.fetching.errors import FetchError

TOKEN_ENV = "PILOTLIGHT_MODELS_TOKEN"  # sent as a bearer token, over HTTPS only
TRIES = 5  # attempts for one chunk; the pause before each doubles
FIRST_PAUSE_S = 0.5
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=30)


class Unreachable(FetchError):
    """The server did not deliver the file in any attempt."""


class RetryLater(Exception):
    """A temporary failure: the request is retried."""


Result = TypeVar("Result")

PASSING = (RetryLater, aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError)


async def tried(work: Callable[[], Awaitable[Result]], what: str, tries: int = TRIES) -> Result:
    """Return the result of `work`, which is retried after doubling pauses on temporary failures.

    Raises Unreachable, whose message starts with `what`, if every attempt has failed.
    """
    for i in range(tries):
        try:
            return await work()
        except PASSING as error:
            if i == tries - 1:
                raise Unreachable(f"{what}: {said(error)}") from None
        await asyncio.sleep(FIRST_PAUSE_S * 2**i)
    raise AssertionError("there is at least one try")


def refuse(status: int, url: str) -> None:
    """Raise RetryLater or FetchError for an HTTP status that brings no file."""
    if status in (200, 206):
        return
    if status in (408, 425, 429) or status >= 500:
        raise RetryLater(f"the server answers {status}")
    hint = f"; a token for it is read from {TOKEN_ENV}" if status in (401, 403) else ""
    raise FetchError(f"{url}: the server answers {status}{hint}")


def headers_for(url: str) -> dict[str, str]:
    token = os.environ.get(TOKEN_ENV, "")
    secret = {"authorization": f"Bearer {token}"} if token and url.startswith("https://") else {}
    return {"accept-encoding": "identity", **secret}


def said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the server stopped sending"
    if isinstance(error, asyncio.IncompleteReadError):
        return "the answer broke off"
    if isinstance(error, aiohttp.TooManyRedirects):
        return "the server redirects too often"
    return str(error) or type(error).__name__

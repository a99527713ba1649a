"""`js.caches`: the Cache API over a cache that stores nothing.

Code that uses it runs, and every lookup is a miss.
"""

from typing import Any

from workers.http.request import Request
from workers.http.response import Response


class Cache:
    async def match(self, request: Any, options: Any = None) -> None:
        """Return None: it is not there."""
        _asked(request)

    async def put(self, request: Any, response: Any) -> None:
        """Consume the response as if it were stored. Raises TypeError where the platform's cache refuses."""
        if _asked(request).method != "GET":
            raise TypeError("caches: only responses to GET can be put")
        if not isinstance(response, Response):
            raise TypeError(f"caches: put takes a Response, and not {type(response).__name__}")
        if response.status == 206 or response.headers.get("vary") == "*":
            raise TypeError("caches: a response with the status 206, or with Vary: *, cannot be put")
        await response.bytes()

    async def delete(self, request: Any, options: Any = None) -> bool:
        _asked(request)
        return False


class CacheStorage:
    default = Cache()

    async def open(self, name: str) -> Cache:
        return self.default


def _asked(request: Any) -> Request:
    return request if isinstance(request, Request) else Request(request)

"""`js.caches`, the Cache API: the site keeps a function's responses in memory.

The site decides which responses are stored, and for how long, by their headers (functions/bindings/storage/response_cache.py). This module has the
platform's methods and errors, and the lifetimes that the `cf` option of `fetch` sets.
"""

from collections.abc import Mapping
from typing import Any

from workers import host
from workers.entrypoint import wait_until
from workers.face import Named, options_of
from workers.http.body import Body
from workers.http.headers import Headers
from workers.http.request import Request
from workers.http.response import Response, pieces, response_of

CACHE = "@cache"
IN_ONE = 64 << 10  # larger bodies are sent as a stream


class Cache(Named):
    def __init__(self, name: str) -> None:
        self._name = name

    async def match(self, request: Any, options: Any = None, **named: Any) -> Response | None:
        """Return the stored response for a request, or None.
        Only GET requests match, unless `ignore_method` is set."""
        asked, given = _asked(request), options_of(options, named, ("ignore_method",), "caches: match")
        if asked.method != "GET" and not given.get("ignore_method"):
            return None
        return await self.match_url(asked.url, asked.headers)

    async def put(self, request: Any, response: Any) -> None:
        """Store a response; its body is consumed. Raises TypeError where the platform does."""
        asked = _asked(request)
        if asked.method != "GET":
            raise TypeError("caches: only responses to GET can be put")
        if not isinstance(response, Response):
            raise TypeError(f"caches: put takes a Response, and not {type(response).__name__}")
        if response.status == 206 or response.headers.get("vary") == "*":
            raise TypeError("caches: a response with the status 206, or with Vary: *, cannot be put")
        await self._put(asked.url, response, None)

    async def delete(self, request: Any, options: Any = None, **named: Any) -> bool:
        """Delete a stored response; return whether there was one."""
        asked, given = _asked(request), options_of(options, named, ("ignore_method",), "caches: delete")
        if asked.method != "GET" and not given.get("ignore_method"):
            return False
        return bool(await host.channel().call(CACHE, "delete", cache=self._name, url=asked.url))

    async def match_url(self, url: str, headers: Headers) -> Response | None:
        asked = {"cache": self._name, "url": url, "headers": headers.multi_items()}
        result = await host.channel().begin(CACHE, "match", (), asked)
        return response_of(result.value, result.body) if result.value["found"] else None

    async def keep(self, url: str, response: Response, ttl_s: float | None) -> None:
        """Store a copy of a response in the background, while the function reads the response."""
        wait_until(self._put(url, response.clone(), ttl_s))

    async def _put(self, url: str, response: Body, ttl_s: float | None) -> None:
        assert isinstance(response, Response)
        whole, stream = response.taken()
        if len(whole or b"") > IN_ONE:
            whole, stream = b"", pieces(whole)
        told = {"cache": self._name, "url": url, "status": response.status, "headers": response.headers.multi_items()}
        await host.channel().begin(CACHE, "put", (), {**told, "content": whole or b"", "ttl_s": ttl_s}, stream)


class CacheStorage:
    default = Cache("")

    async def open(self, name: str) -> Cache:
        return Cache(str(name))


def kept_for_s(options: Mapping[str, Any], status: int) -> float | None:
    """Return how many seconds the `cf` options of a fetch keep a response.
    0 means not at all; None means as long as the response's headers allow."""
    for statuses, ttl_s in dict(options.get("cacheTtlByStatus") or {}).items():
        first, _, last = str(statuses).partition("-")
        if int(first) <= status <= int(last or first):
            return max(0.0, float(ttl_s))
    if (ttl_s := options.get("cacheTtl")) is not None:
        return max(0.0, float(ttl_s))
    return None if options.get("cacheEverything") else 0.0


def _asked(request: Any) -> Request:
    return request if isinstance(request, Request) else Request(request)

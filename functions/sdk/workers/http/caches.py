"""`js.caches`, the Cache API: the site stores a function's responses in memory.

They stay as long as their headers allow.

The site decides which responses are stored (functions/bindings/storage/response_cache.py); this module has the platform's methods and errors, and the
lifetimes that the option `cf` of `fetch` sets.
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
IN_ONE = 64 << 10  # bytes of a body that goes in one message


class Cache(Named):
    def __init__(self, name: str) -> None:
        self._name = name

    async def match(self, request: Any, options: Any = None, **named: Any) -> Response | None:
        """Return the stored response of a request, or None.

        Requests other than GET find none, unless `ignore_method` is set.
        """
        asked, given = _asked(request), options_of(options, named, ("ignore_method",), "caches: match")
        if asked.method != "GET" and not given.get("ignore_method"):
            return None
        return await self.match_url(asked.url, asked.headers)

    async def put(self, request: Any, response: Any) -> None:
        """Keep a response, which is used up. Raises TypeError where the platform's cache refuses."""
        asked = _asked(request)
        if asked.method != "GET":
            raise TypeError("caches: only responses to GET can be put")
        if not isinstance(response, Response):
            raise TypeError(f"caches: put takes a Response, and not {type(response).__name__}")
        if response.status == 206 or response.headers.get("vary") == "*":
            raise TypeError("caches: a response with the status 206, or with Vary: *, cannot be put")
        await self._put(asked.url, response, None)

    async def delete(self, request: Any, options: Any = None, **named: Any) -> bool:
        """Forget a response; return whether there was one."""
        asked, given = _asked(request), options_of(options, named, ("ignore_method",), "caches: delete")
        if asked.method != "GET" and not given.get("ignore_method"):
            return False
        return bool(await host.channel().call(CACHE, "delete", cache=self._name, url=asked.url))

    async def match_url(self, url: str, headers: Headers) -> Response | None:
        asked = {"cache": self._name, "url": url, "headers": headers.multi_items()}
        result = await host.channel().begin(CACHE, "match", (), asked)
        return response_of(result.value, result.body) if result.value["found"] else None

    async def keep(self, url: str, response: Response, ttl_s: float | None) -> None:
        """Keep a copy of a response while its reader reads it."""
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
    """Return for how long the options `cf` of a fetch keep a response, in seconds.

    0 not to keep it; None for as long as its headers say.
    """
    for statuses, ttl_s in dict(options.get("cacheTtlByStatus") or {}).items():
        first, _, last = str(statuses).partition("-")
        if int(first) <= status <= int(last or first):
            return max(0.0, float(ttl_s))
    if (ttl_s := options.get("cacheTtl")) is not None:
        return max(0.0, float(ttl_s))
    return None if options.get("cacheEverything") else 0.0


def _asked(request: Any) -> Request:
    return request if isinstance(request, Request) else Request(request)

"""The Cache API of functions: responses in this site's memory, separate for each function.

Whether and how long a response is kept follows its headers as the platform documents (https://developers.cloudflare.com/workers/runtime-apis/cache)
or, without such headers, its status (https://developers.cloudflare.com/cache/how-to/configure-cache-status-code). The least recently used response is
evicted first.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pilotlight.functions.bindings.assets.asset_files import span_of
from pilotlight.functions.bindings.binding import Binding, BindingError, Body, Pieces, Services, gathered, method
from pilotlight.functions.bindings.place import directory_of
from pilotlight.functions.channel.exchanges import StreamingReply

CACHE = "@cache"  # reserved: no binding of a manifest can have this name
MAX_BYTES = 128 << 20  # for all functions of the site together
MAX_RESPONSE_BYTES = 8 << 20
MAX_KEY_BYTES = 16 << 10
IN_ONE = 64 << 10  # larger bodies are streamed
OVERHEAD_BYTES = 512  # per entry, besides its key and content
DEFAULT_S = {200: 7200.0, 301: 7200.0, 302: 1200.0, 303: 1200.0, 404: 180.0, 410: 180.0}

Pairs = list[tuple[str, str]]
Url = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Name = Annotated[str, Meta(max_length=1000)]


class CacheMatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cache: Name
    url: Url
    headers: Pairs = []


class Put(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cache: Name
    url: Url
    status: Annotated[int, Meta(ge=200, le=599)]
    headers: Pairs
    content: bytes = b""
    ttl_s: float | None = None  # replaces the lifetime from the headers


class Delete(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cache: Name
    url: Url


class StoredResponse(NamedTuple):
    status: int
    headers: Pairs
    content: bytes
    stored_s: float
    until_s: float


class ResponseMemory:
    """The cached responses of all functions, by (function, cache, URL)."""

    def __init__(self, max_bytes: int = MAX_BYTES, now_s: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._now_s = now_s
        self._kept: OrderedDict[tuple[str, str, str], StoredResponse] = OrderedDict()
        self._size = 0

    @classmethod
    def of(cls, state_dir: Path, services: Services) -> "ResponseMemory":
        """Return the site's cache, which all its functions share."""
        place, now_s = directory_of(state_dir, "cache", "responses"), services.clock.now_s
        return services.databases.get(place, lambda path: cls(now_s=now_s))

    def get(self, key: tuple[str, str, str]) -> StoredResponse | None:
        found = self._kept.get(key)
        if found is not None and found.until_s <= self._now_s():
            self.delete(key)
            return None
        if found is not None:
            self._kept.move_to_end(key)
        return found

    def put(self, key: tuple[str, str, str], status: int, headers: Pairs, content: bytes, ttl_s: float) -> None:
        self.delete(key)
        now_s = self._now_s()
        self._kept[key] = kept = StoredResponse(status, headers, content, now_s, now_s + ttl_s)
        self._size += _size_of(key, kept)
        while self._size > self._max_bytes:
            self.delete(next(iter(self._kept)))

    def delete(self, key: tuple[str, str, str]) -> bool:
        """Delete a response; return whether it existed and had not expired."""
        if (found := self._kept.pop(key, None)) is None:
            return False
        self._size -= _size_of(key, found)
        return found.until_s > self._now_s()

    async def close(self) -> None:
        self._kept.clear()
        self._size = 0


class ResponseCache(Binding):
    """The Cache API calls of one function."""

    kind = "cache"

    def __init__(self, memory: ResponseMemory, services: Services) -> None:
        self._memory = memory
        self._function = services.function
        self._held = services.memory
        self._now_s = services.clock.now_s

    @classmethod
    def of(cls, state_dir: Path, services: Services) -> "ResponseCache":
        return cls(ResponseMemory.of(state_dir, services), services)

    @method
    async def match(self, request: CacheMatch) -> Any:
        """Return {found, status, headers} and the body; answers conditional and range requests."""
        kept = self._memory.get((self._function, request.cache, request.url))
        if kept is None:
            return {"found": False}
        asked = {name.lower(): value for name, value in request.headers}
        age_s = max(0, int(self._now_s() - kept.stored_s))
        headers = [*kept.headers, ("age", str(age_s)), ("cf-cache-status", "HIT")]
        if _is_unchanged(kept.headers, asked):
            return {"found": True, "status": 304, "headers": headers, "body": b""}
        status, content = kept.status, kept.content
        if status == 200 and "range" in asked:
            if (span := span_of(asked["range"], len(content))) is None:
                headers = [*_without_length(headers), ("content-range", f"bytes */{len(content)}")]
                return {"found": True, "status": 416, "headers": headers, "body": b""}
            start, length = span
            if length != len(content):
                headers = [
                    *_without_length(headers),
                    ("content-range", f"bytes {start}-{start + length - 1}/{len(content)}"),
                ]
                status, content = 206, content[start : start + length]
        value = {"found": True, "status": status, "headers": headers}
        if len(content) <= IN_ONE:
            return {**value, "body": content}
        return StreamingReply(value, Pieces(content))

    @method
    async def put(self, request: Put, body: Body | None) -> None:
        """Store a response, if its headers and its size allow it."""
        ttl_s = lifetime_s(request.status, request.headers, self._now_s()) if request.ttl_s is None else request.ttl_s
        with self._held.hold() as held:
            try:
                content = request.content if body is None else await gathered(body, MAX_RESPONSE_BYTES, _too_long, held)
            except _TooLongError:
                return
        if ttl_s > 0 and len(content) <= MAX_RESPONSE_BYTES:
            key = (self._function, request.cache, request.url)
            self._memory.put(key, request.status, request.headers, content, ttl_s)

    @method
    async def delete(self, request: Delete) -> bool:
        return self._memory.delete((self._function, request.cache, request.url))


class _TooLongError(BindingError):
    pass


def _too_long(size: int) -> BindingError:
    return _TooLongError(f"{size} bytes are more than a cache keeps")


def lifetime_s(status: int, headers: Iterable[tuple[str, str]], now_s: float) -> float:
    """Return how many seconds a response may be kept, by its headers or else its status; 0 if it may not."""
    found: dict[str, str] = {}
    for name, value in headers:
        lower = name.lower()
        found[lower] = f"{found[lower]}, {value}" if lower in found else value
    told = dict(_directive(each) for each in found.get("cache-control", "").split(","))
    if (
        "set-cookie" in found
        or found.get("vary", "").strip() == "*"
        or told.keys() & {"no-store", "no-cache", "private"}
    ):
        return 0.0
    for name in ("s-maxage", "max-age"):
        if name in told:
            return float(told[name]) if told[name].isascii() and told[name].isdigit() else 0.0
    if "expires" in found:
        try:
            return max(0.0, parsedate_to_datetime(found["expires"]).timestamp() - now_s)
        except ValueError:
            return 0.0  # for example "0" (RFC 9111 section 5.3)
    return DEFAULT_S.get(status, 0.0)


def _directive(text: str) -> tuple[str, str]:
    name, _, value = text.strip().partition("=")
    return name.lower(), value.strip('" ')


def _is_unchanged(headers: Pairs, asked: dict[str, str]) -> bool:
    """Tell whether a conditional request gets a 304 (RFC 9110 section 13.2.2)."""
    kept = {name.lower(): value for name, value in headers}
    if "if-none-match" in asked:
        tags = [each.strip().removeprefix("W/") for each in asked["if-none-match"].split(",")]
        tag = kept.get("etag")
        return tag is not None and ("*" in tags or tag.removeprefix("W/") in tags)
    if "if-modified-since" in asked and "last-modified" in kept:
        try:
            return parsedate_to_datetime(kept["last-modified"]) <= parsedate_to_datetime(asked["if-modified-since"])
        except (ValueError, TypeError):
            return False
    return False


def _without_length(headers: Pairs) -> Pairs:
    return [pair for pair in headers if pair[0].lower() != "content-length"]


def _size_of(key: tuple[str, str, str], kept: StoredResponse) -> int:
    parts = sum(len(name) + len(value) for name, value in kept.headers)
    return OVERHEAD_BYTES + sum(map(len, key)) + parts + len(kept.content)

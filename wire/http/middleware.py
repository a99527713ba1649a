"""ASGI middleware under any server: allowed host names, allowed web pages, the shape of bodies.

A browser runs untrusted code beside servers that listen on this machine. A page can resolve its own name to 127.0.0.1 and then read answers (DNS
rebinding), and it can post forms and open WebSockets without a preflight. So a listener on loopback answers only to configured names and to names
that no public name server returns: localhost, private addresses, this machine's own name, and names below .local, .localhost and .internal, which
containers use for their host. Answers of the API may be read by pages and apps of this machine (CORS), and all answers by configured origins.
"""

import re
import socket
from collections.abc import Coroutine, Iterable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import orjson

from pilotlight.wire.errors import ApiError, dialect_of
from pilotlight.wire.http.exchange import Application

Pairs = list[tuple[bytes, bytes]]  # names lower case

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
# The types that a page may post to any server without a preflight (the Fetch standard's safelisted types), including no type.
FORM_TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
PREFLIGHT_S = 600
# Schemes of installed apps, such as Obsidian's and VS Code's, as Ollama allows them. No page of the web has such an origin.
APP_SCHEMES = ("app://", "tauri://", "vscode-webview://", "vscode-file://", "file://")

_AUTHORITY = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+,;=%-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{0,5}))?")


class Origins:
    """Checks hosts and origins of requests.

    `own_cors` are paths of functions, which have their own CORS; `api_paths` are prefixes that pages and apps of this machine may use.
    """

    def __init__(
        self,
        *,
        is_local: bool,
        hosts: Iterable[str] = (),
        cors_origins: Iterable[str] = (),
        own_cors: str = "/fn/",
        api_paths: tuple[str, ...] = (),
    ) -> None:
        self._is_local = is_local
        self._hosts = frozenset(host.lower() for host in hosts)
        self._own_name = socket.gethostname().lower()
        self._cors_origins = frozenset(cors_origins)
        self._own_cors = own_cors
        self._api_paths = api_paths

    def refusal(self, method: str, first: Mapping[bytes, bytes]) -> ApiError | None:
        """Return why a request is refused; None if it is allowed.
        `first` has the first value of each header."""
        host = first[b"host"].decode("latin-1") if b"host" in first else None
        origin = first.get(b"origin", b"").decode("latin-1")
        if host and not _is_authority(host):  # other parsers may read a URL with such a host differently
            return ApiError("invalid_request", f"the host header {host[:100]!r} names no host")
        if not self._is_local:
            return None
        name = _host_of(f"//{host or ''}")
        if host is not None and not (name in self._hosts or name == self._own_name or _is_local(name)):
            shown = (name or host)[:100]
            sentence = f"{shown!r} is not a name of this machine: to allow it, add it to hosts under [door]"
            return ApiError("misdirected_request", sentence)
        if not origin:
            return None
        kind = first.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        may_be_sent_unasked = b"upgrade" in first or (method not in SAFE_METHODS and kind in FORM_TYPES)
        if not may_be_sent_unasked or host is None or name in self._hosts:
            return None
        if self._is_configured(origin) or _is_of_this_machine(origin) or _host_of(origin) in self._hosts:
            return None
        sentence = (
            f"a page of {origin[:100]!r} may not send this: to allow it, add the origin to cors_origins under [door]"
        )
        return ApiError("forbidden", sentence)

    def cors(self, method: str, path: str, first: Mapping[bytes, bytes]) -> tuple[Pairs, bool]:
        """Return the headers to add to an answer, and whether the request is a preflight.

        Raises ApiError for a preflight of a page that may not read answers.
        """
        origin = first.get(b"origin", b"")
        if not origin or path.startswith(self._own_cors):
            return [], False
        is_question = method == "OPTIONS" and b"access-control-request-method" in first
        named = origin.decode("latin-1")
        if not self._is_configured(named) and not (path.startswith(self._api_paths) and _is_of_this_machine(named)):
            if not is_question:
                return [], False
            sentence = f"a page of {named[:100]!r} may not read answers: to allow it, add the origin to cors_origins under [door]"
            raise ApiError("forbidden", sentence)
        is_any = "*" in self._cors_origins
        said: Pairs = [(b"access-control-allow-origin", b"*" if is_any else origin), (b"vary", b"origin")]
        if not is_question:
            return [*said, (b"access-control-expose-headers", b"*")], False
        said += [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", first.get(b"access-control-request-headers", b"*")),
            (b"access-control-max-age", b"%d" % PREFLIGHT_S),
        ]
        return said, True

    def _is_configured(self, origin: str) -> bool:
        return "*" in self._cors_origins or origin in self._cors_origins


class OriginCheck:
    """Refuse disallowed origins, answer preflights, and add headers for pages that may read the answer."""

    def __init__(self, app: Application, origins: Origins) -> None:
        self._app = app
        self._origins = origins

    def __call__(self, scope: Any, receive: Any, send: Any) -> Coroutine[Any, Any, None]:
        method = scope.get("method", "GET")  # a WebSocket's handshake has none
        first = dict(reversed(scope["headers"]))
        if (refusal := self._origins.refusal(method, first)) is not None:
            return _refuse(refusal, scope, send)
        try:
            said, is_preflight = self._origins.cors(method, scope["path"], first)
        except ApiError as refused:
            return _refuse(refused, scope, send)
        if is_preflight:
            return _answer(204, said, b"", scope, send)
        return self._app(scope, receive, _saying(said, send) if said else send)


class BodyBudget:
    """Limits the memory for bodies of all open requests of a process.
    Above the limit `receive` raises ApiError."""

    def __init__(self, app: Any, max_bytes: int) -> None:
        self.held_bytes = 0
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)  # type: ignore[no-any-return]
        held_bytes = 0

        async def counted() -> Any:
            nonlocal held_bytes
            message = await receive()
            size = len(message.get("body", b""))
            held_bytes += size
            self.held_bytes += size
            if size and self.held_bytes > self._max_bytes:
                sentence = "the bodies of other requests use all memory for bodies: retry later"
                raise ApiError("overloaded", sentence, retry_after_s=1)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self.held_bytes -= held_bytes


def _saying(said: Pairs, send: Any) -> Any:
    async def saying(message: Any) -> None:
        if message["type"] == "http.response.start":
            others = (pair for pair in message.get("headers", ()) if not pair[0].startswith(b"access-control-"))
            # `said` replaces the CORS headers that a site may have added
            message = {**message, "headers": [*others, *said]}
        await send(message)

    return saying


async def _refuse(refusal: ApiError, scope: Any, send: Any) -> None:
    dialect = dialect_of(scope["path"], scope["headers"])
    body = orjson.dumps(refusal.body(dialect))
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await _answer(refusal.status(dialect), headers, body, scope, send)


async def _answer(status: int, headers: Pairs, body: bytes, scope: Any, send: Any) -> None:
    prefix = "" if scope["type"] == "http" else "websocket."
    await send({"type": f"{prefix}http.response.start", "status": status, "headers": headers})
    await send({"type": f"{prefix}http.response.body", "body": body})


@lru_cache(64)
def _is_authority(host: str) -> bool:
    """Tell whether `host` is a host of RFC 3986, with or without a port."""
    found = _AUTHORITY.fullmatch(host)
    return found is not None and int(found[1] or 0) < 65536


@lru_cache(64)  # most requests have the same host, and a look-up is 20 us faster than parsing
def _host_of(url: str) -> str:
    """Return the host of a URL in lower case, without its port; empty if it has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_of_this_machine(origin: str) -> bool:
    return origin.startswith(APP_SCHEMES) or _is_loopback(_host_of(origin))


@lru_cache(64)
def _is_loopback(name: str) -> bool:
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


@lru_cache(64)
def _is_local(name: str) -> bool:
    """Tell whether public DNS can never resolve this name to this machine."""
    try:
        return ip_address(name).is_private  # includes 127.0.0.0/8, 0.0.0.0 and link-local addresses
    except ValueError:
        return name == "localhost" or name.endswith((".localhost", ".local", ".internal"))

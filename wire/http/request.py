"""Requests of one connection, without I/O: bytes go in, frozen events come out.

The parser is llhttp, which refuses ambiguous requests. This module also refuses requests that llhttp accepts but that a proxy in between may have
parsed differently. It is independent of sockets, responses and the meaning of requests.
"""

from contextlib import suppress
from typing import Any
from urllib.parse import unquote

import httptools
import msgspec

from pilotlight.wire.errors import ApiError

Headers = list[tuple[bytes, bytes]]  # names lower case

MAX_PIPELINED = 64  # requests that a client may send before earlier ones are answered

_HTTP2 = b"PRI * HTTP/2"  # the first bytes of an HTTP/2 connection
_FRAMING = frozenset({b"host", b"connection", b"expect", b"transfer-encoding"})


class RequestHead(msgspec.Struct, frozen=True):
    method: bytes
    url: bytes  # its path and query
    version: str
    headers: Headers
    keep_alive: bool
    expects: bool  # the client waits for 100 Continue before it sends the body

    @classmethod
    def of(cls, method: bytes, url: bytes, version: str, headers: Headers) -> "RequestHead":
        """Return the head of a parsed request. Raises ApiError."""
        connection, expects, num_hosts, coding = b"", False, 0, b""
        for name, value in headers:
            if name not in _FRAMING:
                continue
            if name == b"host":
                num_hosts += 1
            elif name == b"connection":
                connection += value.lower() + b","
            elif name == b"expect":
                expects = value.lower() == b"100-continue" and version == "1.1"
            else:
                coding += (b"," if coding else b"") + (value.lower() or b"?")
        if version not in ("1.0", "1.1"):
            raise ApiError("http_version_not_supported", "send HTTP/1.1")
        if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
            raise ApiError("invalid_request", "a request must have one host header")
        if coding and version == "1.0":
            raise ApiError("invalid_request", "HTTP/1.0 has no transfer-encoding: send HTTP/1.1, or a content-length")
        if coding not in (b"", b"chunked"):
            raise ApiError("not_implemented", "the only supported transfer-encoding is chunked")
        tokens = [token.strip() for token in connection.split(b",")] if connection else ()
        keep_alive = (version == "1.1" or b"keep-alive" in tokens) and b"close" not in tokens
        return cls(method, _own_part(url), version, headers, keep_alive, expects)

    def scope(self, around: dict[str, Any]) -> dict[str, Any]:
        """Return the ASGI scope. `around` has the fields that all scopes of the connection have."""
        raw_path, _, query = self.url.partition(b"?")
        path = raw_path.decode("latin-1")
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self.version,
            "method": self.method.decode("latin-1"), "path": unquote(path) if "%" in path else path, "raw_path": raw_path,
            "query_string": query, "root_path": "", "headers": self.headers, **around,
        }  # fmt: skip


def _own_part(url: bytes) -> bytes:
    """Return a request target as path and query. Raises ApiError.
    The absolute form, which clients send to proxies, also names a server."""
    if url.startswith(b"/") or url == b"*":
        return url
    try:
        parts = httptools.parse_url(url)
    except httptools.HttpParserInvalidURLError:
        raise ApiError("invalid_request", "the request's target is not a URL") from None
    return (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")


class RequestStarted(msgspec.Struct, frozen=True):
    head: RequestHead


class BodyPart(msgspec.Struct, frozen=True):
    data: bytes


class Ended(msgspec.Struct, frozen=True):
    """The end of the request that started last."""


class WebSocketAsked(msgspec.Struct, frozen=True):
    head: RequestHead
    rest: bytes  # the bytes after the head


class Refused(msgspec.Struct, frozen=True):
    """A refusal of a request. No bytes after it are parsed."""

    error: ApiError


_ENDED = Ended()

RequestEvent = RequestStarted | BodyPart | Ended | WebSocketAsked | Refused


class RequestReader:
    def __init__(self, max_head_bytes: int, max_headers: int) -> None:
        self.is_in_head = False
        self._max_head_bytes, self._max_headers = max_head_bytes, max_headers
        self._parser = httptools.HttpRequestParser(self)
        self._events: list[RequestEvent] = []
        self._is_at_start = True  # no byte of the connection has arrived
        self._url = b""
        self._headers: Headers = []
        self._fed_bytes = 0  # bytes received since the current head began, while it is incomplete
        self._size = 0  # size of the bytes that are being parsed
        self._num_open = 0

    def feed(self, data: bytes, num_open: int) -> list[RequestEvent]:
        """Parse received bytes into events.
        `num_open` is the number of unanswered requests; a request may become a WebSocket only if there is no other."""
        self._events, self._num_open, self._size = [], num_open, len(data)
        rest: bytes | None = data
        try:
            if self._is_at_start and data.startswith(_HTTP2):
                raise ApiError("http_version_not_supported", "HTTP/2 is not offered here: send HTTP/1.1")
            self._is_at_start = False
            while rest is not None:
                try:
                    self._parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = self._upgrade(rest[upgrade.args[0] :])
            if self.is_in_head:
                self._fed_bytes += len(data)
                if self._fed_bytes > self._max_head_bytes:
                    raise self._too_large()
        except ApiError as error:
            self._events.append(Refused(error))
        except httptools.HttpParserError as error:
            cause = error.__context__
            refusal = cause if isinstance(cause, ApiError) else None
            sentence = f"the request is not valid HTTP: {error}"
            self._events.append(Refused(refusal or ApiError("invalid_request", sentence)))
        return self._events

    def close(self) -> None:
        """Drop the parser, which refers to this reader.

        No bytes are parsed after this. A second call has no effect.
        """
        with suppress(AttributeError):
            del self._parser

    def _upgrade(self, rest: bytes) -> bytes | None:
        """Ignore upgrades except to WebSocket, as RFC 9110 (7.8) allows; return the bytes to parse next.

        The bytes are the request again, without the ignored upgrade. An upgrade to h2c is ignored, too: RFC 9113 removed it, and it would bypass a
        proxy's rules for paths.
        """
        method = self._parser.get_method()
        if method == b"CONNECT":
            raise ApiError("invalid_request", "CONNECT is not supported: send plain HTTP/1.1")
        names = {name for name, _ in self._headers}
        wanted = [value.lower() for name, value in self._headers if name == b"upgrade"]
        has_body = b"transfer-encoding" in names or any(
            name == b"content-length" and value != b"0" for name, value in self._headers
        )
        if method == b"GET" and wanted == [b"websocket"] and not (has_body or self._num_open):
            self._events.append(WebSocketAsked(self._head(), rest))
            return None
        self._headers = [pair for pair in self._headers if pair[0] != b"upgrade"]
        lines = [b"%s %s HTTP/%s" % (method, self._url, self._parser.get_http_version().encode())]
        lines += [b"%s: %s" % pair for pair in self._headers]
        self._parser = httptools.HttpRequestParser(self)
        return b"\r\n".join(lines) + b"\r\n\r\n" + rest

    def _head(self) -> RequestHead:
        parser = self._parser
        return RequestHead.of(parser.get_method(), self._url, parser.get_http_version(), self._headers)

    def _too_large(self) -> ApiError:
        size, count = self._max_head_bytes >> 10, self._max_headers
        return ApiError("headers_too_large", f"the request's head is larger than {size} KiB or {count} headers")

    # Methods that llhttp calls.

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._fed_bytes = 0
        self.is_in_head = True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.is_in_head:  # trailers are ignored; the parser does not remove whitespace after a value
            self._headers.append((name.lower(), value.strip(b" \t")))
            if len(self._headers) > self._max_headers:
                raise self._too_large()

    def on_headers_complete(self) -> None:
        self.is_in_head = False
        # The head is no larger than all bytes that have arrived since its beginning.
        is_surely_small = self._fed_bytes + self._size <= self._max_head_bytes
        if not is_surely_small and sum([len(each[0]) + len(each[1]) for each in self._headers]) > self._max_head_bytes:
            raise self._too_large()
        head = self._head()
        if self._parser.should_upgrade():
            return  # the parser stops at an upgrade
        self._num_open += 1
        if self._num_open > MAX_PIPELINED + 1:
            raise ApiError("invalid_request", f"more than {MAX_PIPELINED} pipelined requests")
        self._events.append(RequestStarted(head))

    def on_body(self, body: bytes) -> None:
        self._events.append(BodyPart(body))

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():
            self._events.append(_ENDED)

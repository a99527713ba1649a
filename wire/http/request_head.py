"""The head of a request, once it is whole: its fields and what follows from them.

Clients repeat themselves: most requests of one program differ in their bodies alone. So a head that comes again is the same object, and what was
derived from it, here or by the application (`memo`), need not be derived again. The length of the body is no part of it, nor is the connection.
Knows fields; refuses to know bytes on a socket and limits.
"""

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools

from wire.errors import ApiError
from wire.http.origins import Origins

Headers = list[tuple[bytes, bytes]]  # names lower case


MAX_KEPT = 512  # heads
MAX_KEPT_BYTES = 2048  # of one: longer ones are made anew
MAX_LENGTH_DIGITS = 10

_LENGTH = re.compile(rb"\r\ncontent-length: ?(?=[0-9]+\r\n)", re.IGNORECASE)


class RequestHead:
    __slots__ = (
        "answer_headers", "expects", "headers", "is_preflight", "keep_alive", "memo", "method", "refusal", "scope", "url", "version",
    )  # fmt: skip

    def __init__(self, method: bytes, url: bytes, version: str, headers: Headers) -> None:
        """`headers` without content-length."""
        self.method = method
        self.url = url
        self.version = version
        self.headers = headers
        self.keep_alive = version == "1.1"
        self.expects = False  # to be told to go on before it sends its body
        self.answer_headers = b""  # lines that every answer to it has besides its own
        self.is_preflight = False  # a browser's question, which the application is not asked
        num_hosts = 0
        coding: bytes | None = None
        for name, value in headers:
            if name == b"host":
                num_hosts += 1
            elif name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                self.keep_alive = (self.keep_alive or b"keep-alive" in tokens) and b"close" not in tokens
            elif name == b"expect":
                self.expects = value.lower() == b"100-continue" and version == "1.1"
            elif name == b"transfer-encoding":
                coding = value.lower() if coding is None else coding + b"," + value.lower()
        self.refusal = _refusal(version, num_hosts, coding)
        self.scope = self._scope()
        self.memo: dict[str, Any] = {}

    def judge(self, origins: Origins) -> None:
        method = self.scope["method"]
        self.refusal = origins.refusal(method, self.headers)
        said, self.is_preflight = origins.cors(method, self.scope["path"], self.headers)
        self.answer_headers = b"".join([b"%s: %s\r\n" % pair for pair in said])

    def _scope(self) -> dict[str, Any]:
        """Without what it tells of the connection."""
        url = self.url
        if not url.startswith(b"/") and url != b"*":
            parts = httptools.parse_url(url)  # the absolute form, which proxies get
            url = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self.version,
            "method": self.method.decode("latin-1"), "path": unquote(path) if "%" in path else path, "raw_path": raw_path,
            "query_string": query, "root_path": "",
        }  # fmt: skip


def _refusal(version: str, num_hosts: int, coding: bytes | None) -> ApiError | None:
    """What the parser lets pass, and another reader on the way may have read otherwise."""
    if version not in ("1.0", "1.1"):
        return ApiError("http_version_not_supported", "send HTTP/1.1")
    if num_hosts > 1 or (num_hosts == 0 and version == "1.1"):
        return ApiError("invalid_request", "a request must have one host header")
    if coding is not None and version == "1.0":
        return ApiError("invalid_request", "HTTP/1.0 has no transfer-encoding: send HTTP/1.1, or a content-length")
    if coding not in (None, b"chunked"):
        return ApiError("not_implemented", "the only transfer-encoding that is read here is chunked")
    return None


class Repeated(NamedTuple):
    """A head as a connection's client has sent it, byte for byte: when it comes again, all that is new is the body and its length."""

    head: RequestHead
    before: bytes  # the length's digits
    after: bytes

    @classmethod
    def of(cls, data: bytes, head: RequestHead, length: bytes | None) -> "Repeated | None":
        """`data` has been parsed: it is this head and the whole of a body of that length. None: its repetition is to be parsed as well."""
        end = data.find(b"\r\n\r\n") + 4
        if not head.keep_alive or length is None or end > MAX_KEPT_BYTES or len(data) - end != int(length):
            return None
        found = _LENGTH.search(data, 0, end)
        if found is None or data[found.end() : found.end() + len(length) + 2] != length + b"\r\n":
            return None
        return cls(head, data[: found.end()], data[found.end() + len(length) : end])

    def request_in(self, data: bytes) -> tuple[bytes, bytes] | None:
        """The length and the body where `data` is this head again, but for the length, and the whole body."""
        before, after = self.before, self.after
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + MAX_LENGTH_DIGITS + 1)
        length = data[start:end]
        if end < 0 or not length.isdigit() or not data.startswith(after, end):
            return None
        body = data[end + len(after) :]
        return (length, body) if len(body) == int(length) else None


class KnownHeads:
    """Those that came last, of all connections."""

    def __init__(self, origins: Origins | None = None) -> None:
        """`origins` judges each once."""
        self._origins = origins
        self._heads: dict[tuple[bytes, bytes, str, tuple[tuple[bytes, bytes], ...]], RequestHead] = {}

    def __len__(self) -> int:
        return len(self._heads)

    def head(self, method: bytes, url: bytes, version: str, headers: Headers, num_bytes: int) -> RequestHead:
        """`num_bytes`: of all of them together, about."""
        key = (method, url, version, tuple(headers))
        known = self._heads.get(key)
        if known is None:
            known = RequestHead(method, url, version, headers)
            if self._origins is not None and known.refusal is None:
                known.judge(self._origins)
            if num_bytes + len(url) <= MAX_KEPT_BYTES:
                self._heads[key] = known
                if len(self._heads) > MAX_KEPT:
                    del self._heads[next(iter(self._heads))]
        return known

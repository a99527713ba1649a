"""The head of a request, once it is whole: its fields and what follows from them.

Clients repeat themselves: on a connection that is kept, most requests differ from the one before in their bodies alone. So a head that comes again is
the same object, and what was derived from it, here or by the application (`memo`), need not be derived again. The length of the body is no part
of it. Knows fields; refuses to know bytes on a socket and limits.
"""

from typing import Any
from urllib.parse import unquote

import httptools

Headers = list[tuple[bytes, bytes]]  # names lower case


class RequestHead:
    __slots__ = ("expects", "has_one_host", "headers", "keep_alive", "memo", "method", "scope", "url", "version")

    def __init__(self, method: bytes, url: bytes, version: str, headers: Headers, around: dict[str, Any]) -> None:
        """`headers` without content-length; `around`: what a scope tells of the connection."""
        self.method = method
        self.url = url
        self.version = version
        self.headers = headers
        self.keep_alive = version == "1.1"
        self.expects = False  # to be told to go on before it sends its body
        num_hosts = 0
        for name, value in headers:
            if name == b"host":
                num_hosts += 1
            elif name == b"connection":
                tokens = [token.strip() for token in value.lower().split(b",")]
                self.keep_alive = (self.keep_alive or b"keep-alive" in tokens) and b"close" not in tokens
            elif name == b"expect":
                self.expects = value.lower() == b"100-continue"
        self.has_one_host = num_hosts == 1 or (num_hosts == 0 and version != "1.1")
        self.scope = self._scope(around)
        self.memo: dict[str, Any] = {}

    def is_same(self, method: bytes, url: bytes, version: str, headers: Headers) -> bool:
        return self.headers == headers and self.url == url and self.method == method and self.version == version

    def _scope(self, around: dict[str, Any]) -> dict[str, Any]:
        url = self.url
        if not url.startswith(b"/") and url != b"*":
            parts = httptools.parse_url(url)  # the absolute form, which proxies get
            url = (parts.path or b"/") + (b"?" + parts.query if parts.query else b"")
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": self.version,
            "method": self.method.decode("latin-1"), "path": unquote(path) if "%" in path else path, "raw_path": raw_path,
            "query_string": query, "root_path": "", **around,
        }  # fmt: skip

"""Request: the argument of a function's `fetch` handler and of its outgoing `fetch` calls."""

from http import HTTPMethod
from typing import Any

from workers.face import as_record, options_of
from workers.http.abort_signal import AbortSignal
from workers.http.body import Body, ByteStream
from workers.http.headers import Headers, HeadersInit
from workers.http.urls import URL

# Options of fetch. Those from "cache" on have no effect on a server.
_KNOWN = (
    "method", "headers", "body", "redirect", "signal", "cf",
    "cache", "credentials", "duplex", "encode_response_body", "fetcher", "keepalive", "mode", "priority", "referrer", "referrer_policy", "window",
)  # fmt: skip


class Request(Body):
    url: str
    method: str
    redirect: str
    signal: AbortSignal | None
    cf: Any

    def __init__(
        self,
        input: Any,
        other_options: Any = None,
        *,
        method: str | None = None,
        headers: HeadersInit = None,
        body: Any = None,
        redirect: str | None = None,
        signal: AbortSignal | None = None,
        cf: Any = None,
        **further: Any,
    ) -> None:
        named = {"method": method, "headers": headers, "body": body, "redirect": redirect, "signal": signal, "cf": cf}
        options = options_of(_options(other_options), {**named, **further}, _KNOWN, "a request")
        base = _options(input) if isinstance(input, Request) else {}
        self.url = input.url if isinstance(input, Request) else URL(input).href
        self.method = method_of(options.get("method") or base.get("method") or "GET")
        self.headers = Headers(options.get("headers", base.get("headers")))
        self.redirect = options.get("redirect") or base.get("redirect") or "follow"
        self.signal = options.get("signal", base.get("signal"))
        self.cf = as_record(options.get("cf", base.get("cf")))
        body = options.get("body", base.get("body"))
        if body is not None and self.method in ("GET", "HEAD"):
            raise TypeError(f"a {self.method} request has no body; use another method")
        super().__init__(body)

    @classmethod
    def new(cls, input: Any, init: Any = None, **options: Any) -> "Request":
        return cls(input, init, **options)

    def clone(self) -> "Request":
        return Request(self, body=self._shared_with_clone())

    def _has_body(self) -> bool:
        return self._whole is not None or self._stream is not None

    def __repr__(self) -> str:
        return f"Request(method={str(self.method)!r}, url={self.url!r})"


def method_of(given: Any) -> str:
    """Return the method, as a member of HTTPMethod if it is one.
    Authors compare it with strings and members, and use `.value`."""
    method = str(given).upper()
    if not method or not method.isascii() or any(c <= " " or c in '()<>@,;:\\"/[]?={}' for c in method):
        raise TypeError(f"{str(given)!r} is no HTTP method")
    return HTTPMethod.__members__.get(method, method)


def _options(given: Any) -> dict[str, Any]:
    """Return options from a dict, or from another request without its URL."""
    if not isinstance(given, Request):
        return dict(given) if given is not None else {}
    return {
        "method": given.method,
        "headers": given.headers,
        "body": given if given._has_body() else None,
        "redirect": given.redirect,
        "signal": given.signal,
        "cf": given.cf,
    }


def received(method: str, url: str, headers: list[tuple[str, str]], whole: bytes | None, stream: Any) -> Request:
    """Return an incoming request, with the URL as the site gives it.
    Unlike one made by a function, a GET may have a body."""
    request = Request("http://localhost/", headers=headers)
    request.url = url
    request.method = HTTPMethod.__members__.get(method, method)
    request._whole = whole or None
    request._stream = None if stream is None else ByteStream(stream)
    return request

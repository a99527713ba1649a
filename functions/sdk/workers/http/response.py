"""Response: status, headers and body, created by a function or received from `fetch`."""

import functools
import json as json_module
import math
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from workers.http.body import Body
from workers.http.headers import Headers, HeadersInit
from workers.http.urls import quoted

NULL_BODY_STATUSES = (101, 204, 205, 304)
REDIRECTS = (301, 302, 303, 307, 308)


class _Json:
    """A descriptor for two methods of one name.
    `Response.json(data)` creates a response; `await response.json()` decodes a body."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return _of_json if instance is None else functools.partial(Body.json, instance)


class Response(Body):
    type = "default"

    def __init__(
        self,
        body: Any = None,
        status: int | HTTPStatus = 200,
        status_text: str = "",
        headers: HeadersInit = None,
        web_socket: Any = None,
        *,
        statusText: str = "",
        webSocket: Any = None,
        url: str = "",
        redirected: bool = False,
        encodeBody: str = "automatic",
        encode_body: str = "automatic",
        cf: Any = None,
        **further: Any,
    ) -> None:
        if further:
            known = "status, status_text, headers, web_socket"
            raise TypeError(f"a response has no option {next(iter(further))!r}; it has {known}")
        if isinstance(status, bool) or not isinstance(status, int) or not 101 <= status <= 599:
            hint = "; options come by name: status=404, headers={...}" if isinstance(status, dict) else ""
            raise TypeError(f"a response's status is a number from 101 to 599, and not {status!r}{hint}")
        self.encode_body = encode_body if encodeBody == "automatic" else encodeBody
        if self.encode_body not in ("automatic", "manual"):
            raise TypeError(f"a response's encode_body is 'automatic' or 'manual', and not {self.encode_body!r}")
        self.status = int(status)
        if body is not None and self.status in NULL_BODY_STATUSES:
            raise TypeError(f"a response with the status {self.status} has no body; leave it out or change the status")
        self.status_text = status_text or statusText or _phrase(self.status)
        self.headers = Headers(headers)
        self.url = url
        self.redirected = redirected
        self.web_socket = web_socket if web_socket is not None else webSocket
        if self.web_socket is not None and self.status != 101:
            raise TypeError(f"a response with a web_socket has the status 101, and not {self.status}")
        super().__init__(body)

    @classmethod
    def new(cls, body: Any = None, init: Any = None, **options: Any) -> "Response":
        """Create a response from (body, init), like JavaScript's constructor."""
        if isinstance(init, Response):
            init = {"status": init.status, "status_text": init.status_text, "headers": init.headers}
        return cls(body, **{**(init or {}), **options})

    json = _Json()
    from_json = fromJson = json

    @staticmethod
    def redirect(url: str, status: int = 302) -> "Response":
        if status not in REDIRECTS:
            raise ValueError(f"{status} is no redirect; it is one of {', '.join(map(str, REDIRECTS))}")
        return Response(None, status, headers={"location": quoted(str(url))})

    @staticmethod
    def error() -> "Response":
        return Response(None, 500)

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def statusText(self) -> str:
        return self.status_text

    @property
    def webSocket(self) -> Any:
        return self.web_socket

    async def memoryview(self) -> memoryview:
        return memoryview(await self.bytes())

    def raise_for_status(self) -> None:
        """Raise OSError if the status is 400 or above, as Pyodide's responses do."""
        if self.status >= 400:
            raise OSError(f"{self.status} {self.status_text} for url: {self.url}")

    def clone(self) -> "Response":
        shared = self._shared_with_clone()
        return Response(
            shared,
            self.status,
            self.status_text,
            self.headers,
            url=self.url,
            redirected=self.redirected,
            encode_body=self.encode_body,
        )

    def replace_body(self, body: Any) -> "Response":
        """Return a copy of this response with another body."""
        kept = [pair for pair in self.headers.multi_items() if pair[0] != "content-length"]
        return Response(body, self.status, self.status_text, kept, url=self.url, encode_body=self.encode_body)

    def __repr__(self) -> str:
        told = [f"status={self.status}"]
        told += [f"status_text={self.status_text!r}"] if self.status_text else []
        told += [f"content_type={self.headers['content-type']!r}"] if "content-type" in self.headers else []
        return f"Response({', '.join([*told, *([f'url={self.url!r}'] if self.url else [])])})"


def _of_json(
    data: Any, status: int = 200, status_text: str = "", headers: HeadersInit = None, **named: Any
) -> Response:
    made = Headers(headers)
    made.setdefault("content-type", "application/json")
    try:
        text = json_module.dumps(data, allow_nan=False)
    except ValueError:  # NaN and infinity, for which JavaScript writes null
        text = json_module.dumps(_finite(data), allow_nan=False)
    return Response(text.encode(), status, status_text, made, **named)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


def response_of(value: Any, body: Any) -> Response:
    """Return a response from its form on the channel: a map and a stream.
    The map is {status, headers, body?, url?, redirected?}."""
    whole = value.get("body") or (None if body is None and value["status"] in (101, 204, 205, 304) else b"")
    return Response(
        body if body is not None else whole,
        value["status"],
        headers=[tuple(pair) for pair in value["headers"]],
        url=value.get("url", ""),
        redirected=value.get("redirected", False),
        encode_body="manual",  # the body already has the coding that its headers name
    )


async def pieces(whole: bytes, size: int = 64 << 10) -> AsyncIterator[bytes]:
    for start in range(0, len(whole), size):
        yield whole[start : start + size]

"""WSGI applications (Flask, Django) in a function: `await wsgi.fetch(app, request, env)`.

Each request runs in a thread; responses are streamed.
"""

import asyncio
import io
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from urllib.parse import unquote_to_bytes, urlsplit

from workers.entrypoint import wait_until
from workers.gateway import BaseOptions, prefix_of
from workers.http.request import Request
from workers.http.response import Response

App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Options(BaseOptions):
    """Options of `fetch`."""


async def fetch(
    app: App, request: Request, env: Any = None, ctx: Any = None, options: BaseOptions | None = None
) -> Response:
    environ = build_environ(request, await request.bytes(), env)
    head: list[tuple[int, list[tuple[str, str]]]] = []

    def start_response(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        head[:] = [(int(status.split(" ", 1)[0]), headers)]
        return _no_write

    def begin() -> tuple[Iterable[bytes], Iterator[bytes], bytes | None]:
        """Call the application and take its first chunk, because it may call start_response only then."""
        pieces = app(environ, start_response)
        iterator = iter(pieces)
        return pieces, iterator, next(iterator, None)

    pieces, iterator, first = await asyncio.to_thread(begin)
    if not head:
        raise RuntimeError("the application returned without calling start_response")
    status, headers = head[0]
    if first is None or status in (204, 205, 304) or request.method == "HEAD":
        await asyncio.to_thread(_close, pieces)
        return Response(None, status, headers=headers)
    return Response(_Rest(pieces, iterator, first), status, headers=headers, encode_body="manual")


class _Rest:
    """The remaining chunks of a response; closed exactly once, even if none is read."""

    def __init__(self, pieces: Iterable[bytes], iterator: Iterator[bytes], first: bytes) -> None:
        self._pieces = pieces
        self._iterator = iterator
        self._first: bytes | None = first
        self._is_closed = False
        # the read that runs in a thread; it continues if the reader leaves
        self._reading: asyncio.Future[bytes | None] | None = None

    def __aiter__(self) -> "_Rest":
        return self

    async def __anext__(self) -> bytes:
        piece, self._first = self._first, None
        if piece is None:
            self._reading = asyncio.ensure_future(asyncio.to_thread(next, self._iterator, None))
            piece = await asyncio.shield(self._reading)
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            wait_until(self._close())  # the application's work continues after the client's disconnect

    async def _close(self) -> None:
        if self._reading is not None:
            await asyncio.wait({self._reading})  # a running generator cannot be closed
        await asyncio.to_thread(_close, self._pieces)


def _close(pieces: Iterable[bytes]) -> None:
    if (close := getattr(pieces, "close", None)) is not None:
        close()


def _no_write(data: bytes) -> None:
    raise NotImplementedError("write() of WSGI is not offered; return the body instead")


def build_environ(request: Request, body: bytes, env: Any = None) -> dict[str, Any]:
    """Return the WSGI environment of a request (PEP 3333)."""
    parts = urlsplit(request.url)
    environ = {
        "REQUEST_METHOD": str(request.method),
        "SCRIPT_NAME": prefix_of(request),
        "PATH_INFO": unquote_to_bytes(parts.path or "/").decode("latin-1"),
        "QUERY_STRING": parts.query,
        "SERVER_NAME": parts.hostname or "localhost",
        "SERVER_PORT": str(parts.port or (443 if parts.scheme == "https" else 80)),
        "SERVER_PROTOCOL": "HTTP/1.1",
        "REMOTE_ADDR": request.headers.get("cf-connecting-ip", "127.0.0.1"),
        "CONTENT_LENGTH": str(len(body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": parts.scheme or "http",
        "wsgi.input": io.BytesIO(body),
        "wsgi.errors": sys.stderr,
        "wsgi.multithread": True,
        "wsgi.multiprocess": True,
        "wsgi.run_once": False,
        "workers.env": env,
    }
    for name, value in request.headers.items():
        key = name.upper().replace("-", "_")
        environ[key if key == "CONTENT_TYPE" else f"HTTP_{key}"] = value
    return environ

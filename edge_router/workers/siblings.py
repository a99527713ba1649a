"""Requests between the workers of one router, over sockets in a private folder.

The kernel gives a client's connection to any worker. State that only one process can keep, such as stored responses and the page, is in the first
worker, which holds a lock. The others forward requests for it there, and one of them takes over when the first one ends. Each worker's metrics are
part of every answer to /metrics, with its index as a label.
"""

import asyncio
import fcntl
import os
import re
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from starlette.types import Receive, Scope, Send
from yarl import URL

from pilotlight.edge_router.forwarding.downstream import Downstream
from pilotlight.edge_router.forwarding.proxy import Proxy
from pilotlight.edge_router.telemetry.metrics import NO_SITE
from pilotlight.edge_router.workers.role import WorkerRole
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.headers import HOP_BY_HOP
from pilotlight.wire.http.exchange import Application

CLIENT = b"x-pilotlight-worker-client"  # worker -> first worker: the client's scheme and address
METRICS = "/worker/metrics"  # the metrics of one worker
METRICS_TIMEOUT_S = 2.0
TAKE_OVER_EVERY_S = 0.1
SUCCESSION_S = 15.0  # limit until the first worker, which has ended, has a successor; it is mostly the time in which its process ends

_SAMPLE = re.compile(rb"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})? ")


class Siblings:
    """The other workers of this router, which can be asked inside `async with`."""

    def __init__(self, role: WorkerRole, render: Callable[[], bytes]) -> None:
        """`render` returns this worker's metrics."""
        self.is_first = False
        self._role = role
        self._render = render
        self._lock_fd = os.open(role.folder / "first.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._sessions: dict[int, aiohttp.ClientSession] = {}
        self._open = AsyncExitStack()

    async def __aenter__(self) -> "Siblings":
        # A new connection for each request, as one that is kept would lead to an earlier first worker.
        self._first = await self._open.enter_async_context(_session_at(self._role.first_socket, is_kept=False))
        for index in range(self._role.count):
            if index != self._role.index:
                session = _session_at(self._role.socket_of(index))
                self._sessions[index] = await self._open.enter_async_context(session)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._open.aclose()

    async def take_over(self) -> None:
        """Wait until no other worker is the first, and become it.

        Only for a worker that answers on its own socket."""
        while not self.is_first:
            try:
                # held until `resign`, or until this process ends
                fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                await asyncio.sleep(TAKE_OVER_EVERY_S)
                continue
            _name(self._role.process_socket, self._role.first_socket)
            self.is_first = True

    async def resign(self, release: Callable[[], Awaitable[None]]) -> None:
        """Let another worker become the first, and wait until it has.

        `release` ends the use of what only one process may have. Later requests wait for the successor, also those that come to this worker.
        """
        if not self.is_first:
            return
        self._role.first_socket.unlink()
        self.is_first = False
        await release()
        fcntl.flock(self._lock_fd, fcntl.LOCK_UN)
        deadline = time.monotonic() + SUCCESSION_S
        while not self._role.first_socket.exists() and time.monotonic() < deadline:
            await asyncio.sleep(TAKE_OVER_EVERY_S / 2)

    async def metrics(self) -> bytes:
        """Return the metrics of all workers, except of one that is being replaced."""
        indices = range(self._role.count)
        texts = await asyncio.gather(*(self._metrics_of(index) for index in indices))
        return merged({index: text for index, text in zip(indices, texts, strict=True) if text is not None})

    async def _metrics_of(self, index: int) -> bytes | None:
        if index == self._role.index:
            return self._render()
        try:
            async with (
                asyncio.timeout(METRICS_TIMEOUT_S),
                self._sessions[index].get(f"http://worker{METRICS}") as response,
            ):
                return await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError):
            return None

    def request(
        self, method: str, target: str, headers: Iterable[tuple[str, str]], body: bytes
    ) -> Any:  # aiohttp's context manager of a response
        """Send a request to the first worker. The result is used as `async with`."""
        url = URL(f"http://worker{target}", encoded=True)
        return self._first.request(method, url, headers=list(headers), data=body or None, allow_redirects=False)


def _session_at(path: Path, *, is_kept: bool = True) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.UnixConnector(str(path), limit=0, force_close=not is_kept),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        timeout=aiohttp.ClientTimeout(total=None),
    )


class FirstWorker:
    """An ASGI application that runs `own` in the first worker; all others forward to it."""

    def __init__(self, own: Application, proxy: Proxy, siblings: Siblings, max_body_bytes: int) -> None:
        self._own = own
        self._proxy = proxy
        self._siblings = siblings
        self._max_body_bytes = max_body_bytes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        if self._siblings.is_first:
            return self._own(scope, receive, send)
        client = Downstream(scope, receive, send)
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]]
        return self._proxy.handle(client, self._read_and_forward(client, headers))

    async def _read_and_forward(self, client: Downstream, headers: list[tuple[str, str]]) -> None:
        body = await client.body(self._max_body_bytes, self._proxy.config.idle_timeout_s, self._proxy.body_timeout_s)
        await client.while_present(self._forward(client, headers, body))

    async def _forward(self, client: Downstream, headers: list[tuple[str, str]], body: bytes) -> None:
        head, ours = client.head, CLIENT.decode()
        kept = [
            pair for pair in headers if pair[0] not in HOP_BY_HOP and pair[0] not in (ours, "content-length", "expect")
        ]
        kept.append((ours, f"{head.scheme} {client.address}"))
        is_stream = False
        try:
            async with AsyncExitStack() as stack:
                response = await self._response(stack, head.method, head.target, kept, body)
                raw = [
                    (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in response.raw_headers
                ]
                forwarded = [pair for pair in raw if pair[0] not in HOP_BY_HOP and pair[0] not in ("date", "server")]
                is_stream = response.content_type == "text/event-stream"
                await client.start_stream(response.status, forwarded)
                async for chunk in response.content.iter_any():
                    await client.write(chunk)
                await client.end_stream()
        except (aiohttp.ClientError, OSError) as error:
            if client.is_streaming and not is_stream:  # the response stays incomplete, which the client notices
                return self._proxy.metrics.ended(NO_SITE, "lost")
            if client.is_streaming:
                sentence = "the worker that kept this has ended: read a background response again after its last event, or send the request again"
                raise ApiError("upstream_lost", sentence) from None
            sentence = f"the worker that keeps this is restarting: {error}"
            raise ApiError("overloaded", sentence, retry_after_s=1) from None

    async def _response(
        self, stack: AsyncExitStack, method: str, target: str, headers: list[tuple[str, str]], body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request to the first worker.

        Tries again while no worker accepts connections, because the request was not sent then."""
        deadline = time.monotonic() + SUCCESSION_S
        while True:
            try:
                request = self._siblings.request(method, target, headers, body)
                response: aiohttp.ClientResponse = await stack.enter_async_context(request)
                return response
            except aiohttp.ClientConnectorError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(TAKE_OVER_EVERY_S)


class PrivateApp:
    """An ASGI application for the other workers: this worker's metrics, and requests to the first worker."""

    def __init__(self, app: Application, render: Callable[[], bytes]) -> None:
        self._app = app
        self._render = render

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == METRICS:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return await send({"type": "http.response.body", "body": self._render()})  # type: ignore[no-any-return]
        scheme, _, address = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == CLIENT), "http"
        ).partition(" ")
        headers = [pair for pair in scope["headers"] if pair[0] != CLIENT]
        await self._app({**scope, "headers": headers, "scheme": scheme, "client": (address, 0)}, receive, send)


@asynccontextmanager
async def private_listener(role: WorkerRole) -> AsyncIterator[socket.socket]:
    """Listen for the other workers. A replacing worker takes the name of its predecessor's socket."""
    role.process_socket.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(role.process_socket))
        listener.listen(128)
        _name(role.process_socket, role.socket_of(role.index))
        yield listener


def _name(process_socket: Path, name: Path) -> None:
    """Give a socket another name, which another process's socket may have had."""
    beside = name.with_suffix(f".{process_socket.stem}")
    os.link(process_socket, beside)
    beside.replace(name)


def merged(texts: Mapping[int, bytes]) -> bytes:
    """Return metrics of several workers, with the label `worker`.
    The format is Prometheus's text format 0.0.4, in which each metric family may occur once."""
    abouts: dict[bytes, list[bytes]] = {}
    samples: dict[bytes, list[bytes]] = {}
    for index, text in texts.items():
        family = b""
        for line in text.splitlines():
            if line.startswith(b"# "):
                family = line.split(b" ", 3)[2]
                lines = abouts.setdefault(family, [])
                if line not in lines and len(lines) < 2:
                    lines.append(line)
            elif (found := _SAMPLE.match(line)) is not None:
                labels = b'worker="%d"' % index + (b"," + found[2] if found[2] else b"")
                samples.setdefault(family, []).append(b"%s{%s} %s" % (found[1], labels, line[found.end() :]))
    return b"".join(line + b"\n" for family, lines in abouts.items() for line in (*lines, *samples.get(family, ())))

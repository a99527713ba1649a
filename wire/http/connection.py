"""A client's connection to our HTTP/1.1 server: bytes in, requests begun one after the other, and an end for whoever goes beyond a limit.

One small object and no task: the parser (llhttp) and the transport call it, and its exchanges do. It sees to the order of pipelined requests, to
heads that repeat themselves, and to what is no plain request: that is refused in a sentence, or handed on with what has been read. Refuses to know
answers (exchange.py) and who serves what is handed on (protocol_handoff.py).
"""

import asyncio
import importlib
import sys
import time
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

import httptools
import orjson

from wire.errors import ApiError, Dialect
from wire.http.exchange import Exchange
from wire.http.protocol_handoff import raw_head
from wire.http.request_head import Headers, Repeated, RequestHead
from wire.http.tunnel import Upgrading

if TYPE_CHECKING:
    from wire.http.server import Server
    from wire.http.websocket import WebSocket

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MAX_PIPELINED = 64  # requests that a client may send ahead of their answers
EARLY_BYTES = 64 << 10  # that a client may send before its handshake is answered
LINGER_S = 2.0  # an answer to a body that was not read to its end must arrive before the connection is reset
NEVER = float("inf")


class Connection(asyncio.Protocol):
    __slots__ = (
        "_around", "_body_bytes", "_client", "_early", "_exchange", "_fed_bytes", "_head_bytes", "_headers", "_in_head", "_incoming", "_is_lingering",
        "_is_paused", "_length", "_limits", "_opening", "_parser", "_refusal", "_repeated", "_server", "_unbegun", "_url", "_waiting",
        "deadline", "is_full", "loop", "transport",
    )  # fmt: skip

    def __init__(self, server: "Server") -> None:
        self.loop = asyncio.get_running_loop()
        self.deadline = NEVER
        self.is_full = False  # what waits for the client has reached the buffer's size
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._opening: bytes | None = b""  # what may yet become HTTP/2's preface; None: it is not
        self._exchange: Exchange | None = None  # being answered
        self._incoming: Exchange | None = None  # whose body is being read
        self._unbegun: Exchange | None = None  # the application has not been told of it yet
        self._waiting: deque[Exchange] = deque()
        self._around: dict[str, Any] = {}  # what its requests' scopes tell of it
        self._headers: Headers = []  # without the body's length, which differs from request to request
        self._length: bytes | None = None
        self._url = b""
        self._head_bytes = 0  # of its whole headers
        self._body_bytes = 0  # of requests that are not answered yet
        self._fed_bytes = 0  # since it began, whole headers or not
        self._in_head = False
        self._early: bytearray | None = None  # what comes behind a handshake before that is answered
        self._is_paused = False
        self._is_lingering = False
        self._refusal: ApiError | None = None
        self._repeated: Repeated | None = None  # the head that came last

    # what the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        server, limits = self._server, self._server.limits
        peer = host_and_port(transport.get_extra_info("peername"))
        self._client = str(peer[0]) if isinstance(peer, tuple) else ""
        refusal = server.admit(self, self._client)
        self.transport.set_write_buffer_limits(high=limits.write_buffer_bytes)
        self.deadline = time.monotonic() + limits.head_timeout_s
        tls = transport.get_extra_info("ssl_object")
        scheme = "http" if tls is None else "https"
        self._around = {"scheme": scheme, "client": peer, "server": server.name}
        if tls is not None and tls.selected_alpn_protocol() == "h2":
            self._opening = None
            return self._hand_over_http2(b"")
        if refusal is not None:
            self.refuse(refusal)

    def eof_received(self) -> None:
        """Who closes the sending half alone has left too; what is written already is still sent before the connection is closed."""
        self.deadline = time.monotonic() + self._limits.stall_s
        self._tell_gone()

    def connection_lost(self, error: Exception | None) -> None:
        self._forget()
        self._tell_gone()

    def pause_writing(self) -> None:
        self.is_full = True
        self.deadline = time.monotonic() + self._server.limits.stall_s

    def resume_writing(self) -> None:
        self.is_full = False
        self.deadline = NEVER if self._exchange is not None else time.monotonic() + self._server.limits.keep_alive_s
        if self._exchange is not None:
            self._exchange.wake()

    def data_received(self, data: bytes) -> None:
        if self._is_lingering:
            return
        if self._early is not None:
            self._early += data
            if len(self._early) > EARLY_BYTES:
                self.hold_back()
            return
        if self._opening is not None:
            data = self._opening + data
            if H2_PREFACE.startswith(data[: len(H2_PREFACE)]):
                if len(data) < len(H2_PREFACE):
                    self._opening = data
                else:
                    self._hand_over_http2(data)
                return
        is_at_start = self._incoming is None and not self._in_head and self._exchange is None
        if is_at_start and self._repeated is not None and (found := self._repeated.request_in(data)) is not None:
            self._begin(Exchange.whole(self, self._repeated.head, self._around, *found))
            return self._tell_app()
        self._parse(data)
        exchange = self._unbegun
        self._tell_app()
        if is_at_start and exchange is not None and exchange.has_all and not self._waiting:
            known = self._repeated
            if known is None or known.head is not exchange.head:
                self._repeated = Repeated.of(data, exchange.head, exchange.declared_length)

    def _parse(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._opening = None
            self._upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            if self._is_past_last:
                return
            self.refuse(self._refusal or ApiError("invalid_request", f"the request is not valid HTTP: {error}"))
        else:
            self._opening = None
            if self._in_head:
                self._fed_bytes += len(data)
                if self._fed_bytes > self._server.limits.max_head_bytes:
                    self.refuse(self._too_large())

    @property
    def _is_past_last(self) -> bool:
        """The newest request is whole and has asked for the connection's end: what comes behind it is nobody's, and spoils no answer."""
        newest = self._waiting[-1] if self._waiting else self._exchange
        return newest is not None and newest.has_all and not newest.head.keep_alive

    # what the parser says

    def on_message_begin(self) -> None:
        self._url, self._headers, self._length = b"", [], None
        self._head_bytes = self._fed_bytes = 0
        self._in_head = True
        if self._exchange is None:
            self.deadline = time.monotonic() + self._server.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # a trailer: nobody reads them
        name, value = name.lower(), value.strip(b" \t")  # the parser leaves what stands behind a value
        if name == b"content-length":
            self._length = value
        else:
            self._headers.append((name, value))
        self._head_bytes += len(name) + len(value)
        limits = self._server.limits
        if (
            len(self._headers) + (self._length is not None) > limits.max_headers
            or self._head_bytes > limits.max_head_bytes
        ):
            self._refusal = self._too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        self._in_head = False
        head = self._whole_head()
        if head.refusal is not None:
            self._refusal = head.refusal
            raise head.refusal.with_traceback(
                None
            )  # it is kept for heads that come again, and would gather the frames of all
        if self._parser.should_upgrade():
            return  # the parser stops here
        exchange = self._incoming = Exchange(self, head, self._around, self._length)
        if self._exchange is None:
            self._begin(exchange)
        elif len(self._waiting) < MAX_PIPELINED:
            self._waiting.append(exchange)
            self.hold_back()
        else:
            self._refusal = ApiError("invalid_request", f"more than {MAX_PIPELINED} requests ahead of their answers")
            raise self._refusal

    def on_body(self, body: bytes) -> None:
        if self._incoming is None:
            return
        self._body_bytes += len(body)
        self._server.body_bytes += len(body)
        if self._server.body_bytes > self._server.limits.max_bodies_bytes:
            message = "the bodies of other requests fill the memory: send yours again soon"
            self._refusal = ApiError("overloaded", message, retry_after_s=1)
            raise self._refusal
        self._incoming.take(body)

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.end_body()
            self._incoming = None

    # what an exchange and the server say

    @property
    def task(self) -> asyncio.Task[None] | None:
        """That answers its request."""
        return None if self._exchange is None else self._exchange.task

    def finished(self, exchange: Exchange) -> None:
        """Its answer is written."""
        if exchange is not self._exchange:
            return
        self._exchange = None
        if not self._waiting:
            self._release_bodies()
        if not exchange.has_all:
            return self._linger()
        if not exchange.keep_alive or self._server.is_stopping:
            self.deadline = time.monotonic() + self._server.limits.stall_s
            return self.transport.close()
        if self._waiting:
            self._begin(self._waiting.popleft())
            self.loop.call_soon(self._tell_app)  # not from within the answer before it
        else:
            self.deadline = time.monotonic() + self._server.limits.keep_alive_s
        if len(self._waiting) <= 1:
            self.read_on()

    def refuse(self, error: ApiError) -> None:
        """Before the request's answer has begun. Of one under way, its own or that of a request before it, only the end can be withheld."""
        self._server.cut[error.word] += 1
        self._release_bodies()
        exchange = self._exchange
        if exchange is not None:
            if exchange.has_begun or exchange is not self._incoming:
                return self.abort()
            self._exchange = self._incoming = None
            exchange.gone()
        body = orjson.dumps(error.body(Dialect.OPENAI))
        status = error.status(Dialect.OPENAI)
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        lines += [
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.headers()),
        ]
        if error.word in ("overloaded", "quota_exceeded"):
            lines += [f"{name}: {value}" for name, value in self._server.overload_headers]
        self.transport.write("\r\n".join(lines).encode() + b"\r\n" + self._server.date + b"\r\n" + body)
        self._linger()

    def overdue(self) -> None:
        if self.is_full:
            self._server.cut["unread"] += 1
            self.abort()
        elif self._is_lingering or self.transport.is_closing():
            self.abort()
        elif not self._in_head and not self._opening:
            self.deadline = time.monotonic() + LINGER_S
            self.transport.close()
        else:
            seconds = self._server.limits.head_timeout_s
            self.refuse(ApiError("request_timeout", f"the request's head took more than {seconds:g} s"))

    def close_if_idle(self) -> None:
        if self._exchange is None:
            self.transport.close()

    def abort(self) -> None:
        self.deadline = NEVER
        self.transport.abort()

    def hold_back(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self.transport.pause_reading()

    def read_on(self) -> None:
        if self._is_paused and not self.transport.is_closing():
            self._is_paused = False
            self.transport.resume_reading()

    @property
    def date(self) -> bytes:
        return self._server.date

    @property
    def is_answering(self) -> bool:
        return self._exchange is not None

    @property
    def is_last(self) -> bool:
        return self._server.is_stopping

    # helpers

    def _begin(self, exchange: Exchange) -> None:
        self._exchange = self._unbegun = exchange
        self.deadline = NEVER

    def _tell_app(self) -> None:
        """Once what has come is parsed: most requests are whole then."""
        exchange, self._unbegun = self._unbegun, None
        if exchange is not None and exchange.head.is_preflight:
            exchange.begin(_answer_preflight)
        elif exchange is not None and self._early is not None:
            exchange.begin(self._websocket)
        elif exchange is not None:
            exchange.begin(self._server.app, self._server.direct)

    def _linger(self) -> None:
        """The rest of what the client sends is thrown away for a moment: closing on unread bytes would reset the answer under it."""
        self._is_lingering = True
        self.deadline = time.monotonic() + LINGER_S
        if self.transport.is_closing():
            return
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self.read_on()
        else:
            self.transport.close()  # TLS cannot half-close

    def _tell_gone(self) -> None:
        for exchange in (self._exchange, *self._waiting):
            if exchange is not None:
                exchange.gone()
        self._waiting.clear()

    def _release_bodies(self) -> None:
        self._server.body_bytes -= self._body_bytes
        self._body_bytes = 0

    def _forget(self) -> None:
        self._release_bodies()
        self._server.forget(self, self._client)

    def _too_large(self) -> ApiError:
        limits = self._server.limits
        sentence = (
            f"the request's head is larger than {limits.max_head_bytes >> 10} KiB or {limits.max_headers} headers"
        )
        return ApiError("headers_too_large", sentence)

    def _upgrade(self, rest: bytes) -> None:
        """To a WebSocket. Any other wish is passed over, as RFC 9110 (7.8) allows, and so is h2c, which RFC 9113 has removed: it would lead past
        whatever a front judges by paths. `rest` came behind the head."""
        if self._parser.get_method() == b"CONNECT":
            return self.refuse(ApiError("invalid_request", "there are no tunnels here: send plain HTTP/1.1"))
        wanted = [value.lower() for name, value in self._headers if name == b"upgrade"]
        if self._may_upgrade and wanted == [b"websocket"]:
            return self._to_tunnel(rest) if self._server.others.sockets is not None else self._to_websocket(rest)
        self._headers = [pair for pair in self._headers if pair[0] != b"upgrade"]
        plain = self._raw_head()
        self._parser = httptools.HttpRequestParser(self)
        self._parse(plain + rest)

    @property
    def _may_upgrade(self) -> bool:
        """No answer is on its way, and no body."""
        if self._exchange is not None or self.transport.is_closing() or self._length not in (None, b"0"):
            return False
        is_get = self._parser.get_method() == b"GET"
        return is_get and not any(name == b"transfer-encoding" for name, _ in self._headers)

    def _to_tunnel(self, rest: bytes) -> None:
        self.deadline = NEVER
        head = self._whole_head()
        scope = {**head.scope, **self._around, "headers": [*head.headers]}
        self._server.others.serve_socket(Upgrading(scope, rest, self.transport, self._forget))

    def _to_websocket(self, rest: bytes) -> None:
        self._early = bytearray(rest)
        exchange = self._unbegun = Exchange(self, self._whole_head(), self._around, None)
        exchange.has_all, exchange.keep_alive = True, False
        self._begin(exchange)

    async def _websocket(self, scope: Any, receive: Any, send: Any) -> None:
        if "wire.http.websocket_handshake" not in sys.modules:  # 40 ms, and most processes never have a WebSocket
            await asyncio.to_thread(importlib.import_module, "wire.http.websocket_handshake")
        from wire.http.websocket_handshake import PendingUpgrade

        await PendingUpgrade(self._server.app, self._open_websocket)(scope, receive, send)

    def _open_websocket(self, headers: Headers) -> "WebSocket":
        from wire.http.websocket import WebSocket

        exchange = self._exchange
        assert exchange is not None
        assert self._early is not None
        self.transport.write(exchange.switching_head(headers))
        exchange.is_done = exchange.has_begun = True
        exchange.wake()
        limits = self._server.limits
        return WebSocket(
            self.transport,
            is_client=False,
            early=bytes(self._early),
            max_message_bytes=limits.max_message_bytes,
            on_lost=lambda: self.connection_lost(None),
        )

    def _hand_over_http2(self, data: bytes) -> None:
        if not self._server.http2:
            return self.refuse(ApiError("http_version_not_supported", "HTTP/2 is not offered here: send HTTP/1.1"))
        self._hand_over(data)

    def _hand_over(self, data: bytes) -> None:
        """`data`: all that was read of it."""
        self._forget()
        self._server.others.serve_stream(self.transport, data)

    def _raw_head(self) -> bytes:
        parser = self._parser
        version = parser.get_http_version().encode()
        return raw_head(parser.get_method(), self._url, version, self._headers, self._length)

    def _whole_head(self) -> RequestHead:
        parser = self._parser
        return self._server.heads.head(
            parser.get_method(), self._url, parser.get_http_version(), self._headers, self._head_bytes
        )


async def _answer_preflight(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def host_and_port(address: object) -> object:
    """As ASGI has them: IPv6 addresses of sockets have two parts more."""
    return address[:2] if isinstance(address, tuple) else address

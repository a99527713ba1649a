"""Values that can be sent to another function, but not stored.

HTTP messages, files and forms are sent with their content. Functions, RpcTargets and streams are sent as a number in the session.
"""

from collections.abc import Callable
from typing import Any, Protocol

from pilotlight.functions.channel.frames import RESPONSE
from workers.http.forms import Blob, File, FormData
from workers.http.headers import Headers
from workers.http.request import Request, received
from workers.http.response import Response, response_of
from workers.http.streams import ByteStream
from workers.values import KEPT, DataCloneError, Packer, Unpackers, pack, unpack

HEADERS, REQUEST, BLOB, FORM, STUB, STREAM = "$headers", "$request", "$blob", "$form", "$stub", "$stream"
SENT = f"{KEPT}, Request, Response, Headers, Blob, FormData, streams, functions and RpcTargets"


class Exporter(Protocol):
    def export(self, value: Any) -> int | None:
        """Return the number by which the other side can call a function, an RpcTarget or a stream.
        Return None for any other value."""


class Importer(Protocol):
    def stub(self, id: int) -> Any: ...

    def stream(self, id: int) -> Any: ...


def pack_sent(value: Any, where: str, session: Exporter) -> Any:
    """Return the plain form of a value to send. Raises DataCloneError."""
    return pack(value, where, _packer(session), SENT)


def unpack_sent(value: Any, session: Importer) -> Any:
    return unpack(value, _unpackers(session))


def _packer(session: Exporter) -> Packer:
    def packed(value: Any, where: str) -> Any:
        if isinstance(value, Headers):
            return {HEADERS: _pairs(value)}
        if isinstance(value, Response):
            if value.web_socket is not None:
                raise DataCloneError(f"{where} is a Response with a WebSocket; only `fetch` can answer with one")
            return {
                RESPONSE: {
                    "status": value.status,
                    "headers": _pairs(value.headers),
                    "url": value.url,
                    **_body(value, session),
                }
            }
        if isinstance(value, Request):
            told = {"method": str(value.method), "url": value.url, "headers": _pairs(value.headers)}
            cf = pack(value.cf, f"{where}.cf")
            return {REQUEST: {**told, "redirect": value.redirect, "cf": cf, **_body(value, session)}}
        if isinstance(value, Blob):
            return {BLOB: {"data": value.raw(), "type": value.type, "name": getattr(value, "name", None)}}
        if isinstance(value, FormData):
            return {FORM: [[name, pack_sent(field, where, session)] for name, field in value.items()]}
        id = session.export(value)
        return None if id is None else {STREAM if hasattr(value, "__aiter__") else STUB: id}

    return packed


def _pairs(headers: Headers) -> list[list[str]]:
    return [list(pair) for pair in headers.multi_items()]


def _body(message: Request | Response, session: Exporter) -> dict[str, Any]:
    whole, stream = message.taken()
    return {"body": whole} if stream is None else {"stream": session.export(stream)}


def _unpackers(session: Importer) -> Unpackers:
    def stream(told: Any) -> Any:
        return session.stream(told["stream"]) if "stream" in told else None

    def request(told: Any) -> Request:
        made = received(told["method"], told["url"], _tuples(told["headers"]), told.get("body"), stream(told))
        made.redirect, made.cf = told["redirect"], unpack(told["cf"])
        return made

    def blob(told: Any) -> Blob:
        data, kind, name = [told["data"]], told["type"], told["name"]
        return Blob(data, kind) if name is None else File(data, name, kind)

    table: dict[str, Callable[[Any], Any]] = {
        HEADERS: lambda pairs: Headers(_tuples(pairs)),
        REQUEST: request,
        RESPONSE: lambda told: response_of(told, stream(told)),
        BLOB: blob,
        FORM: lambda fields: FormData([(name, unpack_sent(field, session)) for name, field in fields]),
        STUB: session.stub,
        STREAM: lambda id: ByteStream(session.stream(id)),
    }
    return table


def _tuples(pairs: Any) -> list[tuple[str, str]]:
    return [(name, value) for name, value in pairs]

"""The common part of Request and Response: a body that can be read once, in many forms.

The body is bytes or a stream: any iterator or async iterator of str or bytes. Reading it a second time raises BodyUsedError.
"""

import json as json_module
from collections.abc import AsyncIterator, Iterator
from typing import Any

from workers.face import Buffer, as_record
from workers.http.forms import Blob, FormData, decode_form, encode_multipart
from workers.http.headers import Headers
from workers.http.streams import Readable
from workers.http.tee import Tee
from workers.http.urls import URLSearchParams


class BodyUsedError(OSError, TypeError):
    """A body was read twice.
    It is an OSError, as in the platform's SDK, and a TypeError, as in JavaScript."""


class ByteStream(Readable):
    """`response.body`: an async iterator over bytes."""

    def __init__(self, pieces: AsyncIterator[Any]) -> None:
        self.is_used = False  # set by the first read, and by closing
        self._pieces = pieces

    def __aiter__(self) -> "ByteStream":
        return self

    async def __anext__(self) -> bytes:
        self.is_used = True
        while True:
            piece = as_bytes(await self._pieces.__anext__())
            if piece:
                return piece

    async def aclose(self) -> None:
        self.is_used = True
        if (aclose := getattr(self._pieces, "aclose", None)) is not None:
            await aclose()

    async def cancel(self, reason: Any = None) -> None:
        await self.aclose()


class Body:
    headers: Headers

    def __init__(self, source: Any) -> None:
        self._whole: bytes | None = None
        self._stream: ByteStream | None = None
        self._is_taken = False
        if isinstance(source, Body):
            if source.is_streamed and source.body_used:
                raise BodyUsedError("the body has been read already and cannot be sent")
            source._is_taken, self._whole, self._stream = True, source._whole, source._stream
        else:
            self._whole, self._stream, content_type = _parts(source, type(self).__name__)
            if content_type and "content-type" not in self.headers:
                self.headers["content-type"] = content_type

    @property
    def body(self) -> Any:
        """Return the body as a stream, or None for a message without a body."""
        if self._stream is not None:
            return self._stream
        return None if self._whole is None else ByteStream(_once(self._whole))

    @property
    def js_object(self) -> Any:
        """The JavaScript object that the platform's SDK wraps; here the object itself."""
        return self

    _js_request = js_object

    @property
    def is_streamed(self) -> bool:
        return self._stream is not None

    async def bytes(self) -> bytes:
        if self.body_used:
            raise BodyUsedError("the body has been read already; read it once, or clone() before")
        self._is_taken = self._whole is not None or self._stream is not None
        if self._stream is not None:
            return b"".join([piece async for piece in self._stream])
        return self._whole or b""

    async def text(self) -> str:
        return (await self.bytes()).decode("utf-8", "replace")

    async def json(self) -> Any:
        return as_record(json_module.loads(await self.bytes()))

    async def form_data(self) -> FormData:
        return decode_form(await self.bytes(), self.headers.get("content-type", ""))

    async def blob(self) -> Blob:
        return Blob([await self.bytes()], self.headers.get("content-type", ""))

    async def array_buffer(self) -> Buffer:
        return Buffer(await self.bytes())

    buffer = arrayBuffer = array_buffer
    string = text
    formData = form_data

    @property
    def body_used(self) -> bool:
        return self._is_taken or (self._stream is not None and self._stream.is_used)

    @property
    def bodyUsed(self) -> bool:
        return self.body_used

    def taken(self) -> tuple[Any, Any]:
        """Take the body in order to send it: (bytes or None, stream or None)."""
        if self.body_used:
            raise BodyUsedError("the body has been read already and cannot be sent")
        self._is_taken = self._whole is not None or self._stream is not None
        return self._whole, self._stream

    def _shared_with_clone(self) -> Any:
        """Return a body for a clone.
        A stream is split: chunks that one side has read stay in memory for the other."""
        if self.body_used:
            raise BodyUsedError("the body has been read already and cannot be cloned")
        if self._stream is None:
            return self._whole
        left, right = Tee(self._stream).branches
        self._stream = ByteStream(left)
        return right


def as_bytes(piece: Any) -> bytes:
    if isinstance(piece, bytes):
        return piece
    if isinstance(piece, str):
        return piece.encode()
    if isinstance(piece, (bytearray, memoryview)):
        return bytes(piece)
    raise TypeError(f"a body's stream gave {type(piece).__name__}; it must give str or bytes")


def _parts(source: Any, owner: str) -> tuple[bytes | None, ByteStream | None, str]:
    if source is None:
        return None, None, ""
    if isinstance(source, str):
        return source.encode(), None, "text/plain;charset=UTF-8"
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), None, ""
    if isinstance(source, FormData):
        data, content_type = encode_multipart(source)
        return data, None, content_type
    if isinstance(source, Blob):
        return source.raw(), None, source.type
    if isinstance(source, URLSearchParams):
        return source.toString().encode(), None, "application/x-www-form-urlencoded;charset=UTF-8"
    if isinstance(source, ByteStream):
        if source.is_used:
            raise BodyUsedError("the stream has been read already and cannot be a body")
        return None, source, ""
    if hasattr(source, "__aiter__"):
        return None, ByteStream(source.__aiter__()), ""
    if isinstance(source, Iterator):
        return None, ByteStream(_each(source)), ""
    hint = "; Response.json(...) makes one of JSON" if isinstance(source, (dict, list)) else ""
    error = TypeError(f"Unsupported type in {owner}: {type(source).__name__}{hint}")
    error.add_note("a body is str, bytes, a stream, FormData or Blob")
    raise error


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def _each(source: Iterator[Any]) -> AsyncIterator[Any]:
    for piece in source:
        yield piece

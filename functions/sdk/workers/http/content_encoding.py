"""Compress the bodies of responses as their header `Content-Encoding` demands.

A body with `encodeBody="manual"` is compressed already: https://developers.cloudflare.com/workers/runtime-apis/response/#the-encodebody-option
"""

import zlib
from typing import Any

from workers.http.body import ByteStream
from workers.http.response import Response

WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's window bits for the formats of RFC 9110 section 8.4.1


def coded(response: Response) -> tuple[bytes | None, ByteStream | None, list[tuple[str, str]]]:
    """Take a response's body in order to send it: (bytes or None, stream or None, headers)."""
    whole, stream = response.taken()
    headers = response.headers.multi_items()
    bits = WINDOW_BITS.get(str(response.headers.get("content-encoding", "")).strip().lower())
    if bits is None or response.encode_body == "manual" or (whole is None and stream is None):
        return whole, stream, headers
    headers = [pair for pair in headers if pair[0] != "content-length"]
    if stream is not None:
        return None, ByteStream(_Compressed(stream, bits)), headers
    compress = zlib.compressobj(wbits=bits)
    return compress.compress(whole) + compress.flush(), None, headers


class _Compressed:
    """A compressed stream, flushed after each chunk so that the chunk can be decoded at once."""

    def __init__(self, stream: Any, bits: int) -> None:
        self._stream = stream
        self._compress = zlib.compressobj(wbits=bits)
        self._is_over = False

    def __aiter__(self) -> "_Compressed":
        return self

    async def __anext__(self) -> bytes:
        if self._is_over:
            raise StopAsyncIteration
        try:
            piece = await self._stream.__anext__()
        except StopAsyncIteration:
            self._is_over = True
            return self._compress.flush()
        return self._compress.compress(piece) + self._compress.flush(zlib.Z_SYNC_FLUSH)

    async def aclose(self) -> None:
        await self._stream.aclose()

"""WebSocket messages on a channel: kind, length and payload, in the two streams of one exchange.

Nothing of RFC 6455 is here: frames, masks and handshakes end at the site's HTTP server. A close is also a message, the last of its direction. Both
processes import this module, so it imports only the standard library.
"""

from collections.abc import Iterator
from typing import NamedTuple

TEXT, BYTES, CLOSE = 1, 2, 3
HEAD_BYTES = 5
NO_STATUS, ABNORMAL = 1005, 1006  # close codes for internal use, never sent
MAX_REASON_BYTES = 123


class SocketClose(NamedTuple):
    code: int = NO_STATUS
    reason: str = ""


Message = str | bytes | SocketClose


class MessageError(Exception):
    """The bytes are not a valid message; the exchange is no longer usable."""


class MessageTooLarge(MessageError):
    pass


def encode(message: Message) -> bytes:
    if isinstance(message, str):
        kind, payload = TEXT, message.encode("utf-8", "replace")
    elif isinstance(message, bytes):
        kind, payload = BYTES, message
    else:
        kind, payload = CLOSE, message.code.to_bytes(2, "big") + message.reason.encode("utf-8", "replace")
    return b"%c%b%b" % (kind, len(payload).to_bytes(4, "big"), payload)


class MessageDecoder:
    """Decodes bytes into messages. Buffers at most one incomplete message."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Decode the bytes that have arrived; yield complete messages. Raises MessageError."""
        buffer = self._buffer
        buffer += data
        start = 0
        try:
            while len(buffer) - start >= HEAD_BYTES:
                size = int.from_bytes(buffer[start + 1 : start + HEAD_BYTES], "big")
                if size > self._max_bytes:
                    raise MessageTooLarge(f"a message of {size} bytes, of at most {self._max_bytes}")
                end = start + HEAD_BYTES + size
                if end > len(buffer):
                    return
                kind, payload = buffer[start], bytes(memoryview(buffer)[start + HEAD_BYTES : end])
                start = end
                yield _decoded(kind, payload)
        finally:
            del buffer[:start]


def _decoded(kind: int, payload: bytes) -> Message:
    try:
        if kind == TEXT:
            return payload.decode()
        if kind == BYTES:
            return payload
        if kind == CLOSE and 2 <= len(payload) <= MAX_REASON_BYTES + 2:
            return SocketClose(int.from_bytes(payload[:2], "big"), payload[2:].decode())
    except UnicodeDecodeError:
        raise MessageError("a text that is not UTF-8") from None
    raise MessageError(f"a message of the kind {kind} with {len(payload)} bytes")

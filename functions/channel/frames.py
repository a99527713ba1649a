"""Frames on the socket between runtime and isolate: a 4-byte big-endian length and a msgpack map.

Either side may start an exchange; the runtime's ids are even, an isolate's odd. Decoding checks every field, because the other side may be hostile.
Values are plain (None, bool, int, float, str, bytes, list, map); `plain` converts others or names those that it cannot convert. Both processes import
this module, so it imports only the standard library and msgspec.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

LENGTH_BYTES = 4
UNNUMBERED = -1  # id of a request that no channel has numbered yet
SCALARS = (str, int, float, bytes, bytearray, memoryview, type(None))  # includes bool, a subclass of int
_PLAIN = (str, int, float, bytes, bool)
# An RPC call that returns a Response sends a map with only this key; its value has status, headers and, unless streamed, the body.
RESPONSE = "$response"


class Frame(msgspec.Struct, frozen=True, tag_field="kind", forbid_unknown_fields=True):
    id: int


class BindingCall(Frame, frozen=True, tag="call"):
    """Isolate to runtime: call a method of a binding."""

    binding: str
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    streamed: bool = False  # a body follows in chunks
    within: int = -1  # id of the request that makes the call; -1 if none


class FetchEvent(Frame, frozen=True, tag="fetch"):
    """An HTTP request: runtime to isolate or, for a subrequest, isolate to runtime."""

    method: str
    url: str
    headers: list[tuple[str, str]] = []
    body: bytes = b""
    streamed: bool = False
    entrypoint: str = "default"
    options: dict[str, Any] = {}
    within: int = -1


class ScheduledEvent(Frame, frozen=True, tag="scheduled"):
    cron: str
    scheduled_time_ms: int


class QueueEvent(Frame, frozen=True, tag="queue"):
    """Runtime to isolate: messages for a queue consumer, each {id, timestamp_ms, body, attempts}."""

    queue: str
    messages: list[dict[str, Any]]


class TailEvent(Frame, frozen=True, tag="tail"):
    """Runtime to isolate: invocations of other functions for a tail consumer, as Cloudflare's TraceItems."""

    events: list[dict[str, Any]]


class RpcEvent(Frame, frozen=True, tag="rpc"):
    """Call a method of an entrypoint; `options` may name a Durable Object's class and id."""

    entrypoint: str
    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    streamed: bool = False
    options: dict[str, Any] = {}


class Reply(Frame, frozen=True, tag="reply"):
    value: Any = None
    streamed: bool = False


class Fail(Frame, frozen=True, tag="fail"):
    """A failure, instead of a reply or in the middle of either stream."""

    code: str | int
    status: int
    message: str
    name: str = "Error"
    detail: str = ""  # the author's traceback
    value: Any = None  # the exchange's result despite the failure: the decisions of a failed queue handler


class StreamChunk(Frame, frozen=True, tag="chunk"):
    data: bytes


class StreamEnd(Frame, frozen=True, tag="end"):
    pass


class More(Frame, frozen=True, tag="more"):
    """Credit: the reader of the stream has consumed this many bytes."""

    bytes: int


class Cancel(Frame, frozen=True, tag="cancel"):
    pass


class Ping(Frame, frozen=True, tag="ping"):
    """A probe of the other side's event loop; a blocked loop does not reply."""


class Pong(Frame, frozen=True, tag="pong"):
    pass


class Note(Frame, frozen=True, tag="note"):
    """A message without a reply.

    Isolate to runtime: it is ready, has background work left, or cannot start. Runtime to isolate: import the function's module.
    """

    name: str
    value: Any = None


FunctionEvent = FetchEvent | ScheduledEvent | QueueEvent | TailEvent | RpcEvent  # events that a function handles
Request = BindingCall | FunctionEvent
AnyFrame = (
    BindingCall
    | FetchEvent
    | ScheduledEvent
    | QueueEvent
    | TailEvent
    | RpcEvent
    | Reply
    | Fail
    | StreamChunk
    | StreamEnd
    | More
    | Cancel
    | Ping
    | Pong
    | Note
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyFrame] = msgspec.msgpack.Decoder(AnyFrame)


class FrameError(Exception):
    """The bytes are not a valid frame; the connection is no longer usable."""


def encode(frame: AnyFrame, max_bytes: int) -> bytes:
    """Encode a frame, preceded by its length.
    Raises ValueError if the frame is too large, TypeError if a value is not plain."""
    buffer = bytearray(LENGTH_BYTES)
    try:
        _encoder.encode_into(frame, buffer, LENGTH_BYTES)
    except OverflowError as error:
        raise ValueError(f"an integer beyond 64 bits cannot be sent: {error}") from None
    size = len(buffer) - LENGTH_BYTES
    if size > max_bytes:
        raise ValueError(f"{size} bytes in one message, of at most {max_bytes}; send less, or send a stream")
    buffer[:LENGTH_BYTES] = size.to_bytes(LENGTH_BYTES, "big")
    return bytes(buffer)


class FrameDecoder:
    """Decodes bytes into frames. Buffers at most one incomplete frame."""

    def __init__(self, max_bytes: int) -> None:
        self.size = 0  # size in bytes of the last decoded frame
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[AnyFrame]:
        """Decode the bytes that have arrived; yield complete frames. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        start, held = 0, len(buffer)
        try:
            while held - start >= LENGTH_BYTES:
                size = int.from_bytes(buffer[start : start + LENGTH_BYTES], "big")
                if size > self._max_bytes:
                    raise FrameError(f"a message of {size} bytes, of at most {self._max_bytes}")
                end = start + LENGTH_BYTES + size
                if end > held:
                    break
                body = bytes(memoryview(buffer)[start + LENGTH_BYTES : end])
                start, self.size = end, size
                yield _decoded(body)
        finally:
            del buffer[:start]


def _decoded(body: bytes) -> AnyFrame:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise FrameError(f"a message that cannot be decoded: {error}") from None


def plain(value: Any, where: str = "the value") -> Any:
    """Convert a value to plain types.
    Raises TypeError, with the path of the value that cannot be converted."""
    if isinstance(value, SCALARS):
        return scalar(value)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_key(key, where): plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    kind = type(value).__name__
    raise TypeError(
        f"{where} is of type {kind}, which cannot be sent; send None, bool, int, float, str, bytes, list or dict"
    )


def scalar(value: Any) -> Any:
    """Convert an instance of SCALARS to its plain type.
    Encoders refuse subclasses such as numpy's float64 or a template's SafeString."""
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__index__(value)
    return float.__float__(value) if isinstance(value, float) else bytes(memoryview(value))


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise TypeError(f"{where} has the key {key!r}, which is not a string; only strings can be keys")
    return str.__str__(key)

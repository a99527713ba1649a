"""Server-sent events: `encode_event`, and its inverse `EventDecoder`, which takes chunks of any size.

Events are returned parsed or as bytes, because a relay needs only a little of each.
"""

import re
from typing import NamedTuple

DONE = b"[DONE]"  # the data of the event that ends an OpenAI-style stream
CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEARTBEAT = b": keep-alive\n\n"  # a comment: proxies see traffic, and clients ignore it
DEFAULT_MAX_EVENT_BYTES = 4 << 20

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_DATA_LINE = re.compile(rb"data(?<![^\r\n]data)(?=[:\r\n])")  # starts with a literal, for which a search is fast


class Event(NamedTuple):
    """An event. `raw` has the received bytes with the final blank line, so relays forward it unchanged."""

    data: bytes | None  # None for a comment, or for an event without data, which clients ignore
    name: bytes | None
    raw: bytes

    @property
    def is_done(self) -> bool:
        return self.data == DONE


class SSEError(ValueError):
    """The stream is not server-sent events, or one event is too large to buffer."""


def encode_event(data: bytes, name: str | None = None) -> bytes:
    """Encode an event. `data` may contain newlines; `name` may not."""
    head = b""
    if name is not None:
        head += b"event: " + name.encode() + b"\n"
    if b"\n" in data or b"\r" in data:
        lines = _LINE_END.split(data)
        return head + b"".join(b"data: " + line + b"\n" for line in lines) + b"\n"
    return head + b"data: " + data + b"\n\n"


class EventDecoder:
    """Turns received bytes into whole events. Holds at most one unfinished event of `max_event_bytes`."""

    def __init__(self, max_event_bytes: int = DEFAULT_MAX_EVENT_BYTES) -> None:
        self._buffer = bytearray()
        self._scanned = 0  # no event ends before this offset, so that a long event is not searched twice
        self._max_event_bytes = max_event_bytes
        self._at_start = True

    @property
    def pending_bytes(self) -> int:
        """Bytes of an event that has not ended."""
        return len(self._buffer)

    def feed(self, chunk: bytes) -> list[Event]:
        """Return the events that `chunk` completes.
        Raises SSEError when an unfinished event outgrows the limit."""
        return [parse_event(raw) for raw in self.split(chunk)]

    def split(self, chunk: bytes) -> list[bytes]:
        """Return the completed events as bytes, with their blank lines. Raises SSEError."""
        if self._at_start and not self._buffer and not chunk.startswith(b"\xef"):
            self._at_start = not chunk  # with any bytes, the start is over: there is no byte-order mark
        if (
            not self._buffer
            and not self._at_start
            and 0 <= chunk.find(b"\n\n") == len(chunk) - 2
            and b"\r" not in chunk
        ):
            return [chunk]  # the chunk is exactly one event, which is the usual case
        self._buffer += chunk
        if self._at_start and len(self._buffer) >= 3:
            self._at_start = False
            if self._buffer.startswith(b"\xef\xbb\xbf"):
                del self._buffer[:3]
        events: list[bytes] = []
        start = 0
        while (end := self._find_end(max(start, self._scanned))) is not None:
            events.append(bytes(self._buffer[start:end]))
            start = self._scanned = end
        del self._buffer[:start]
        self._scanned = max(0, len(self._buffer) - 3)  # an end sequence is at most four bytes long
        if len(self._buffer) > self._max_event_bytes:
            raise SSEError(f"an event of more than {self._max_event_bytes} bytes")
        return events

    def _find_end(self, offset: int) -> int | None:
        match = _EVENT_END.search(self._buffer, offset)
        if match is None:
            return None
        # A CR at the very end may be the first half of CR LF: wait for the next byte.
        if match.end() == len(self._buffer) and self._buffer[-1:] == b"\r":
            return None
        return match.end()


def has_data(raw: bytes) -> bool:
    """Tell whether an event, as bytes, has data. Comments and events without a data field have none."""
    return _DATA_LINE.search(raw) is not None


def parse_event(raw: bytes) -> Event:
    data: list[bytes] = []
    name = None
    for line in raw.split(b"\n") if b"\r" not in raw else _LINE_END.split(raw):
        if line.startswith(b"data: "):
            data.append(line[6:])
            continue
        if not line or line.startswith(b":"):
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value
    return Event(data[0] if len(data) == 1 else b"\n".join(data) if data else None, name, raw)

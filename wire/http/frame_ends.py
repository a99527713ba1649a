"""Where the frames of a WebSocket's stream end (RFC 6455, section 5.2): so much of it must be known by who would add one to somebody else's stream.

Between two frames a control frame may always stand, even inside a message of several. Reads heads and counts bytes; refuses to look at payloads.
"""

CLOSE = 8
_LONGEST_HEAD = 14


class FrameEnds:
    """One direction, from its first byte on, in whatever pieces it comes."""

    def __init__(self) -> None:
        self.has_close = False  # the side that sends has said its last
        self._head = b""  # of a frame whose head has begun
        self._left = 0  # of a frame's payload

    @property
    def is_between(self) -> bool:
        return not (self._left or self._head)

    def feed(self, data: bytes, *, to_end: bool = False) -> int:
        """How many bytes were looked at: all, or, `to_end`, those up to the next end of a frame."""
        at, size = 0, len(data)
        while at < size:
            if self._left:
                step = min(self._left, size - at)
                self._left -= step
                at += step
            else:
                at = self._read_head(data, at)
            if to_end and self.is_between:
                break
        return at

    def _read_head(self, data: bytes, at: int) -> int:
        begun = len(self._head)
        head = self._head + data[at : at + _LONGEST_HEAD - begun]
        size = _head_size(head)
        if size is None or len(head) < size:
            self._head = head
            return len(data)
        self._head = b""
        short = head[1] & 0x7F
        self._left = short if short < 126 else int.from_bytes(head[2 : 4 if short == 126 else 10])
        self.has_close = self.has_close or head[0] & 0x0F == CLOSE
        return at + size - begun


def _head_size(head: bytes) -> int | None:
    """None: that is not known yet."""
    if len(head) < 2:
        return None
    short, is_masked = head[1] & 0x7F, head[1] & 0x80
    return 2 + (0 if short < 126 else 2 if short == 126 else 8) + (4 if is_masked else 0)

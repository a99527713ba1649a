"""A function's output: read at a bounded rate, kept in a short memory, and passed to followers.

Output above the rate makes only the function wait.
"""

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import Callable

log = logging.getLogger("pilotlight.function")

KEPT_LINES = 200
READ_BYTES = 4 << 10  # at once: each line is handed on in the loop that serves all, 20 us for it
MAX_LINE = 4096


class FunctionLog:
    """The output of one process; `follow` gets each line."""

    def __init__(self, function: str, kib_per_s: int, follow: Callable[[str], None] | None = None) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._function = function
        self._pause_s = READ_BYTES / (kib_per_s << 10)
        self._follow = follow
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd, self.write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    def close_write_end(self) -> None:
        """Close this process's copy, once the child has its own."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        self.close_write_end()
        if self._fd < 0:
            return
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        self._take_last()
        os.close(self._fd)
        self._fd = -1

    def _read(self) -> None:
        try:
            data = os.read(self._fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._fd)
            return
        self._take(data)
        if len(data) == READ_BYTES:
            self._loop.remove_reader(self._fd)
            self._timer = self._loop.call_later(self._pause_s, self._resume)

    def _resume(self) -> None:
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._read)

    def _take_last(self) -> None:
        try:
            self._take(os.read(self._fd, 64 << 10))
        except OSError:
            return

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            lines, self._rest = [*lines, self._rest[:MAX_LINE]], b""
        for raw in lines:
            line = printable(raw[:MAX_LINE].decode("utf-8", "replace"))
            self.lines.append(line)
            log.info("%s: %s", self._function, line)
            if self._follow is not None:
                self._follow(line)


def printable(text: str, keep: str = "\t") -> str:
    """Return text with control characters escaped: those that move a terminal's cursor, start a line, or reverse the order of text."""
    return _UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else ascii(found[0])[1:-1], text)


_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")

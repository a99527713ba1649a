"""A function's output: read at a limited rate, kept briefly in memory, and passed to followers.

Output above the rate blocks only the function. An isolate labels each line of Python output with the request whose task printed it
(labelled_output.py); lines without a label belong to no request.
"""

import asyncio
import logging
import os
import re
from collections import deque
from collections.abc import Callable

from pilotlight.support.logs import printable

log = logging.getLogger("pilotlight.function")

KEPT_LINES, SHOWN_LINES = 200, 20
READ_BYTES = 4 << 10  # per read, because each line costs 20 us of the event loop that serves all functions
MAX_LINE = 4096
MAX_LABEL = 24
MAX_REQUESTS = 4096  # number of a process's latest requests whose lines are attributed; their background work may print after they end


class FunctionLog:
    """The output of one process.
    `follow` gets each line; `record` gets the invocation's id (0 if none), the level and the line."""

    def __init__(
        self,
        function: str,
        kib_per_s: int,
        follow: Callable[[str], None] | None = None,
        record: Callable[[int, str, str], None] | None = None,
    ) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._record = record
        self._invocations: dict[int, int] = {}  # invocation ids by request id, oldest first
        self._function = function
        self._pause_s = READ_BYTES / (kib_per_s << 10)
        self._follow = follow
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._fd, self.write_fd = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop.add_reader(self._fd, self._read)

    def attribute(self, request: int, invocation: int) -> None:
        """Attribute the output of one of the process's requests to an invocation."""
        self._invocations[request] = invocation
        if len(self._invocations) > MAX_REQUESTS:
            del self._invocations[next(iter(self._invocations))]

    def last(self) -> list[str]:
        """Return the last lines, as many as a message to the author may have."""
        return list(self.lines)[-SHOWN_LINES:]

    def close_write_end(self) -> None:
        """Close the runtime's copy of the write end, once the child has its own."""
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
        if len(self._rest) > MAX_LINE + MAX_LABEL:
            label = LABEL.match(self._rest)
            lines, self._rest = [*lines, self._rest], label[0] if label else b""
        for raw in lines:
            label = LABEL.match(raw)
            line = printable(raw[label.end() if label else 0 :][:MAX_LINE].decode("utf-8", "replace"))
            self.lines.append(line)
            log.info("%s: %s", self._function, line)
            if self._follow is not None:
                self._follow(line)
            if self._record is not None:
                request, level = (int(label[1]), LEVELS[label[2]]) if label else (-1, "log")
                self._record(self._invocations.get(request, 0), level, line)


LABEL = re.compile(rb"\x1e(-?\d{1,18})([oe])\x1f")  # label of a line: request id, and o or e for the stream
LEVELS = {b"o": "log", b"e": "error"}

"""Output of a function's Python code, with a label on each line: the request that printed it.

Many requests share a process and its output, so the runtime could not attribute lines otherwise. The function controls its labels, but they only
affect its own log. functions/host/logs.py removes them.
"""

import io
import sys

from pilotlight.functions.channel.connection import current_request

MAX_OPEN = 64 << 10  # longest unfinished line that is kept, in characters


class LabelledOutput(io.TextIOWrapper):
    def __init__(self, stream: io.TextIOWrapper, letter: str) -> None:
        """Replace `stream`, which must not be used any longer; its lines get labels with `letter`."""
        super().__init__(stream.detach(), "utf-8", "backslashreplace", line_buffering=True)
        self._letter = letter
        self._started: dict[int, str] = {}  # unfinished line of each request

    def write(self, text: str) -> int:
        request = current_request.get()
        lines = (self._started.pop(request, "") + text).split("\n")
        if lines[-1]:
            self._started[request] = lines[-1]
        if len(lines) > 1:
            super().write("".join(f"\x1e{request}{self._letter}\x1f{line}\n" for line in lines[:-1]))
        if lines[-1] and len(lines[-1]) > MAX_OPEN:
            self.finish()
        return len(text)

    def finish(self) -> None:
        """Write unfinished lines."""
        started, self._started = self._started, {}
        for request, line in started.items():
            super().write(f"\x1e{request}{self._letter}\x1f{line}\n")


def install() -> None:
    """Label standard output and standard error from now on."""
    sys.stdout, sys.stderr = LabelledOutput(sys.stdout, "o"), LabelledOutput(sys.stderr, "e")  # type: ignore[arg-type]

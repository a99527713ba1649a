"""The spans of a site's start and of its models' wakes: the newest 512, served at /timeline.

A cold start is a row of spans in Unix time (a process, its imports, a model's weights, ...), so that measurements from outside can be aligned with
them. Independent of the work in a span.
"""

import os
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

import msgspec

LENGTH = 512


class Span(msgspec.Struct, frozen=True):
    name: str
    began_s: float  # seconds of Unix time
    ended_s: float
    what: str = ""  # the model, if any


class Timeline:
    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=LENGTH)

    def note(self, name: str, began_s: float, ended_s: float | None = None, what: str = "") -> None:
        self._spans.append(Span(name, began_s, time.time() if ended_s is None else ended_s, what))

    def note_phases(self, phases: Iterable[tuple[str, float]], ended_s: float, what: str = "") -> float:
        """Record consecutive phases, the last of which ends at `ended_s`. Return when the first began."""
        named = list(phases)
        began_s = at = ended_s - sum(seconds for _, seconds in named)
        for name, seconds in named:
            self.note(name, at, at + seconds, what)
            at += seconds
        return began_s

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(self._spans)


def process_began_s() -> float | None:
    """Return the Unix time at which this process started, to 10 ms; None if it is unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return time.time() - age_s

"""One check of all waits: sites that keep a request waiting, silent streams, clients that do not read.

A timer for each would be set and cleared for every token. The objects themselves decide what a silence means.
"""

import asyncio
import time
from operator import methodcaller
from typing import NamedTuple, Protocol

from pilotlight.support.background import for_each
from pilotlight.support.time_limits import Pauses
from pilotlight.wire.hop.continuation import MAX_DELIVERED_BYTES

LOOK_AGAIN_S = 0.5  # silence inside a stream after which its site is checked again
# silence after which a request or a stream that cannot go elsewhere leaves a site whose probes fail: the site may only be busy
LOST_S = 30.0
# number of checks in one group; each takes up to a microsecond
LOOKED_AT_ONCE = 64


class AttemptLimits(NamedTuple):
    first_byte_s: float  # timeout of the first byte, or of the whole answer if it is sent in one piece
    stall_s: float  # silence after which the stream moves to another site, if possible
    is_continuation: bool  # the stream was started by another site
    lost_s: float = LOST_S


class AnswerLimits(NamedTuple):
    # size of a response that is not a stream: it is read whole, so that another site can answer if this one fails
    max_body_bytes: int = 64 << 20
    # wait for the end of the HTTP body after the last event: then the connection can be reused
    last_chunk_s: float = 0.5
    # size of the delivered part of a stream, above which the stream cannot continue at another site
    max_delivered_bytes: int = MAX_DELIVERED_BYTES


class Watched(Protocol):
    def look(self, now: float, awake_since: float) -> None:
        """End a wait that has lasted too long. Times are on `time.monotonic`'s clock.
        This process was stopped until `awake_since`, so silence before then means nothing."""


class SilenceWatch:
    def __init__(self, interval_s: float, standstill_s: float = LOOK_AGAIN_S) -> None:
        """`standstill_s`: a check that is later than this means that this process was stopped."""
        self._interval_s = interval_s
        self.pauses = Pauses(interval_s, standstill_s)
        self.watched: set[Watched] = set()

    async def run(self) -> None:
        """Check all requests periodically until cancelled, in small groups with other work in between.

        Checking nine thousand at once delayed every token by 12 ms.
        """
        pauses = self.pauses
        pauses.check(time.monotonic())
        while True:
            await asyncio.sleep(self._interval_s)
            pauses.check(time.monotonic())
            watched = tuple(self.watched)
            for start in range(0, len(watched), LOOKED_AT_ONCE):
                now = time.monotonic()
                pauses.check(now)
                due = (each for each in watched[start : start + LOOKED_AT_ONCE] if each in self.watched)
                for_each(due, methodcaller("look", now, pauses.ended_at), "the time limits of one request")
                await asyncio.sleep(0)

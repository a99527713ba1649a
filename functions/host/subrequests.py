"""Count a function's requests to the runtime (binding calls, fetches, connections) per request."""

import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NamedTuple

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.channel.streams import Inbound
from pilotlight.wire.tracing import CURRENT, Parent

OUTSIDE = -1  # id for work outside of requests
OUTSIDE_S = 1.0  # in each period of this length, work outside of requests may make as many subrequests as one request


class Dial(NamedTuple):
    """A request for a TCP connection or, without `connects`, for the addresses of a name."""

    host: str
    port: int
    within: int = OUTSIDE
    connects: bool = True


SubrequestHandler = Callable[[frames.Request | Dial, Inbound | None], Awaitable[Any]]


class Subrequests:
    def __init__(
        self,
        handler: SubrequestHandler,
        limit: int,
        open_requests: Collection[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: number of subrequests of one request.

        `open_requests`: a view of the ids of the open ones.
        """
        self._handler = handler
        self._limit = limit
        self._open_requests = open_requests
        self._clock = clock
        self._counts: dict[int, int] = {}  # subrequests by request
        self._parents: dict[int, Parent] = {}  # parent spans by request; empty without tracing
        self._outside_since = 0.0

    async def answer(self, frame: frames.Request, body: Inbound | None) -> Any:
        """Answer a subrequest. Raises Failure."""
        within = getattr(frame, "within", OUTSIDE)
        self._count(within)
        CURRENT.set(self._parents.get(within, {}))  # each subrequest is answered in a separate task
        return await self._handler(frame, body)

    async def dial(self, wanted: Dial) -> Any:
        """Connect, or resolve a name, for the function. Raises Failure and OSError."""
        self._count(wanted.within)
        return await self._handler(wanted, None)

    def begin(self, id: int) -> None:
        """Record the tracing span that a request's subrequests belong to."""
        if parent := CURRENT.get():
            self._parents[id] = parent

    def forget(self, id: int) -> None:
        self._counts.pop(id, None)
        self._parents.pop(id, None)

    def _count(self, within: int) -> None:
        if within not in self._open_requests:  # no open request: background work after a response, or a wrong id
            within = next(iter(self._open_requests), OUTSIDE)
            if within == OUTSIDE and (now := self._clock()) - self._outside_since > OUTSIDE_S:
                self._outside_since, self._counts[OUTSIDE] = now, 0
        count = self._counts[within] = self._counts.get(within, 0) + 1
        if count > self._limit:
            sentence = f"this request has made {self._limit} subrequests, which is the limit"
            raise Failure(sentence, code="too_many_subrequests", status=429)

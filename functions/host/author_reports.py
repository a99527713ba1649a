"""Reports for a function's author: its output and its failures, to the site's log and to followers."""

import logging
from collections.abc import Callable

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.logs import FunctionLog

log = logging.getLogger("pilotlight.function")


class AuthorReports:
    def __init__(
        self,
        function: str,
        kib_per_s: int,
        follow: Callable[[str], None] | None = None,
        record: Callable[[int, str, str], None] | None = None,
    ) -> None:
        """`follow` gets every line and fault.
        `record` gets the invocation's id, the level and the text of every line."""
        self.follow = follow
        self._record = record
        self._function = function
        self._kib_per_s = kib_per_s

    def new_log(self) -> FunctionLog:
        """Return a log for the output of one process."""
        return FunctionLog(self._function, self._kib_per_s, self.follow, self._record)

    def tell(self, fault: Fault) -> None:
        """Report a fault, unless its cause is a disconnected client."""
        if fault.code == "cancelled":
            return
        log.warning("%s: %s", self._function, fault.detail or fault.message)
        if self.follow is not None:
            self.follow(fault.detail or fault.message)

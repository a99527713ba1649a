"""Reports for a function's author: its output, and why it failed, in the site's log and to followers."""

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
        """Collect a function's output.

        `follow` gets every line and fault, `record` every line with its level and the id of its invocation.
        """
        self.follow = follow
        self._record = record
        self._function = function
        self._kib_per_s = kib_per_s

    def new_log(self) -> FunctionLog:
        """Return the log of one process."""
        return FunctionLog(self._function, self._kib_per_s, self.follow, self._record)

    def tell(self, fault: Fault) -> None:
        """Report a fault, except a disconnect of the client."""
        if fault.code == "cancelled":
            return
        log.warning("%s: %s", self._function, fault.detail or fault.message)
        if self.follow is not None:
            self.follow(fault.detail or fault.message)

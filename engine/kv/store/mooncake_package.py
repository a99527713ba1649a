"""The timeouts of Mooncake's package, set through its environment, which it reads when it is imported."""

import os

# By default it waits 30 s for bytes of an unreachable machine, and forever for a hanging master. A transfer that it gives up has lost its connection,
# so no byte comes late. Joining holds Python's lock while it asks a master, which may just have stopped, 22 times: for 23 s in all.
_SETTINGS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_LOG_LEVEL": "WARNING",
}


def bound_waits() -> None:
    """Set the package's timeouts, except those that the environment already has."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

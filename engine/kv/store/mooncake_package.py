"""The timeouts of the Mooncake package, set by environment variables before the package is imported."""

import os

# By default the package waits 30 s for bytes of an unreachable machine, and forever for a hanging master. It closes the connection of a transfer that
# times out, so no byte arrives late. Joining holds Python's lock while it asks the master up to 22 times, which takes 23 s if the master has just
# stopped.
_SETTINGS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_LOG_LEVEL": "WARNING",
}


def bound_waits() -> None:
    """Set the package's timeouts in the environment, except those that are already set."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

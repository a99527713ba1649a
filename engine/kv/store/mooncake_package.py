"""How long Mooncake's package waits for who does not answer: known to it by the environment alone, which it reads when it is imported."""

import os

# Of itself it waits 30 s for bytes of a machine that is cut off, and without end for a master that hangs. A transfer that it gives up has lost its
# connection, so no byte comes late. Becoming a member holds Python's lock while a master is asked that stopped just then, 22 times: for 23 s in all.
_SETTINGS = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_LOG_LEVEL": "WARNING",
}


def bound_waits() -> None:
    """Bound the package's waits, but for those that the environment has a say about already."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)

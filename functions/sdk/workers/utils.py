"""`import_from_javascript`: the two modules of the platform's own that Python has under another name."""

from types import SimpleNamespace
from typing import Any

from workers import entrypoint, host
from workers.remote.stubs import RpcStub, RpcTarget


def import_from_javascript(name: str) -> Any:
    """Return the Python form of `cloudflare:workers`. Raises ImportError for other modules."""
    if name != "cloudflare:workers":
        raise ImportError(
            f"{name!r} cannot be imported: functions run in CPython, without JavaScript; "
            "only 'cloudflare:workers' can be imported; for sockets use Python's `socket` or asyncio.open_connection",
            name=name,
        )
    return SimpleNamespace(
        env=host.env,
        waitUntil=entrypoint.wait_until,
        WorkerEntrypoint=entrypoint.WorkerEntrypoint,
        DurableObject=entrypoint.DurableObject,
        WorkflowEntrypoint=entrypoint.WorkflowEntrypoint,
        RpcTarget=RpcTarget,
        RpcStub=RpcStub,
    )

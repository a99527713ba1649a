"""`import_from_javascript`: only `cloudflare:workers` exists, as the Python package `workers`."""

from types import SimpleNamespace
from typing import Any

from workers import entrypoint, host
from workers.remote.stubs import RpcStub, RpcTarget


def import_from_javascript(name: str) -> Any:
    """Return the Python package for `cloudflare:workers`. Raises ImportError for other modules."""
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

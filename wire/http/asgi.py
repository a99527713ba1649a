"""Parts of an ASGI exchange that every application needs.

They read the body within a limit, watch for a disconnect, and send a response.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from pilotlight.wire.errors import ApiError

BODY_TIMEOUT_S = 60.0  # time limit for a whole body; the largest body that a site accepts by default needs 140 kB/s

Headers = Iterable[tuple[str, str]]


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, within_s: float = BODY_TIMEOUT_S) -> bytes:
    """Read a whole body.

    A body that is too large or takes too long is refused while it arrives. Raises ApiError, ClientDisconnect.
    """
    encoding = header(scope, "content-encoding")
    if encoding is not None and encoding.lower() != "identity":
        raise ApiError("invalid_request", "a request body must not be compressed; drop the content-encoding header")
    declared = header(scope, "content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise too_large(limit_bytes)
    chunks, total, more = list[bytes](), 0, True
    try:
        async with asyncio.timeout(within_s):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunks.append(message.get("body", b""))
                total += len(chunks[-1])
                if total > limit_bytes:
                    raise too_large(limit_bytes)
                more = message.get("more_body", False)
    except TimeoutError:
        sentence = f"the body did not arrive within {within_s:g} s; send it faster or send less"
        raise ApiError("request_timeout", sentence) from None
    return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Await the work in the caller's task; cancel it when the client disconnects.

    Returns after the work's scopes are left."""
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect")
    try:
        await work
    except asyncio.CancelledError:
        if not has_left or task.cancelling() > 1:  # another task has cancelled this task
            raise
    finally:
        watcher.cancel()
        if has_left:
            task.uncancel()


async def send_json(send: Send, body: bytes, status: int = 200, headers: Headers = ()) -> None:
    pairs = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    await send(response_start(status, pairs))
    await send({"type": "http.response.body", "body": body})


def response_start(status: int, headers: Headers) -> Message:
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    return {"type": "http.response.start", "status": status, "headers": encoded}


def header(scope: Scope, name: str) -> str | None:
    """Return the first header with this name, in lower case; None if there is none."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return bytes(value).decode("latin-1")
    return None


def query_number(query: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    """Return a whole number of a query string. Raises ApiError."""
    if (value := query.get(name)) is None:
        return default
    value = value.removesuffix(".0")  # some clients write all numbers so
    if not (value.isascii() and value.isdigit() and len(value) < 10 and int(value) >= least):
        raise ApiError("invalid_request", f"{name} must be a whole number from {least} on", param=name)
    return int(value)


def too_large(limit_bytes: int) -> ApiError:
    return ApiError("body_too_large", f"the body is larger than the limit of {limit_bytes} bytes; send less")

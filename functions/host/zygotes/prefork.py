"""Warm-up of the site's zygote: a short isolate's life, before any isolate is forked.

Effects of first execution (specialised bytecode, caches of types and methods) are then inherited by all isolates, and their pages are not written to,
and so not copied, by each: this saves 0.8 ms of a start. Leaves no state behind.
"""

import asyncio
import socket
import sys
from pathlib import Path
from typing import Any

from pilotlight.functions.channel import Channel, Failure, Inbound, frames
from pilotlight.functions.host.isolates import isolate_main
from pilotlight.functions.host.zygotes.control_messages import Boot
from workers import entrypoint, host

FUNCTION = Path(__file__).with_name("prefork_function.py")
REQUESTS = 20  # the interpreter adapts code that has run eight times
HEADERS = [("host", "here"), ("user-agent", "warm-up"), ("accept", "*/*")]


def warm_up() -> None:
    before = entrypoint.on_background
    try:
        asyncio.run(_warm_up())
    finally:
        host.connect(None)
        entrypoint.on_background = before
        sys.modules.pop(FUNCTION.stem, None)


async def _warm_up() -> None:
    ours, theirs = socket.socketpair()
    serving = asyncio.ensure_future(isolate_main.serve(theirs, Boot(str(FUNCTION), [], [])))
    channel = await Channel.open(ours, _nothing_outside, is_runtime=True)
    event = frames.FetchEvent(frames.UNNUMBERED, "GET", "http://here/", HEADERS, options={"cf": {"colo": ""}})
    for _ in range(REQUESTS):
        await channel.request(event)
        await channel.ping()
    channel.close()
    await serving


async def _nothing_outside(frame: frames.Request, body: Inbound | None) -> Any:
    raise Failure("no bindings are available while the zygote warms up")

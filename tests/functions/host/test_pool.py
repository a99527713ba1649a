"""Requests that wait for an isolate of a function, and how their wait ends."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.failure import Failure
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.sandbox.processes import descendants
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker

ECHO = """
from workers import WorkerEntrypoint, Response

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        return Response(await request.text())
"""
LIMIT_S = 20.0  # only ends a test that would hang


@pytest.fixture
async def served(make_served: ServedMaker) -> AsyncIterator[Served]:
    """Serve a function with one isolate, one request at a time, and one waiting request."""
    async with make_served(tier=1, limits={"concurrency": 1, "max_isolates": 1, "max_waiting": 1}) as made:
        made.add(ECHO)
        yield made


async def test_a_request_beyond_the_limit_of_waiting_ones_is_refused(served: Served) -> None:
    released = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await released.wait()
        yield b"late"

    assert await served.get(method="POST", body=b"warm") == b"warm"
    asking = [asyncio.ensure_future(served.get(method="POST", body=late())) for _ in range(3)]
    (refused,), others = await asyncio.wait(asking, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    with pytest.raises(Failure, match="are busy"):
        await refused
    released.set()
    assert await asyncio.gather(*others) == [b"late", b"late"]


async def starting(served: Served) -> list["asyncio.Task[bytes]"]:
    """Send three requests: the first starts an isolate, the second waits for it, the third waits for a free one."""
    asking = [asyncio.create_task(served.get(method="POST", body=b"here")) for _ in range(3)]
    await eventually(lambda: served.functions.pools["f"].waiters.count == 1)
    return asking


async def test_a_waiter_learns_that_an_isolate_could_not_be_started(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def failing(sock: socket.socket, *args: Any, **options: Any) -> Channel:
        await tried.wait()
        raise OSError("no room")

    monkeypatch.setattr(Channel, "open", failing)
    asking = await starting(served)
    tried.set()
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*asking, return_exceptions=True)
    assert [isinstance(answer, Fault) and answer.code for answer in answers] == ["no_isolate"] * 3
    zygote = served.functions.pools["f"].factory.zygote.current
    assert zygote is not None
    await eventually(lambda: zygote.can_fork and not descendants(zygote.pid))  # no process is left


async def test_a_waiter_learns_that_those_have_left_for_whom_an_isolate_was_started(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(sock: socket.socket, *args: Any, **options: Any) -> Channel:
        with sock:
            return await asyncio.Future()

    with monkeypatch.context() as patched:
        patched.setattr(Channel, "open", never)
        *leaving, waiting = await starting(served)
    for task in leaving:
        task.cancel()
    assert await asyncio.wait_for(waiting, LIMIT_S) == b"here"


async def test_a_waiter_for_a_function_that_is_removed_gets_an_error_at_once(served: Served) -> None:
    never = asyncio.Event()

    async def late() -> AsyncIterator[bytes]:
        await never.wait()
        yield b""

    assert await served.get(method="POST", body=b"warm") == b"warm"
    pool = served.functions.pools["f"]
    asking = [asyncio.create_task(served.get(method="POST", body=late())) for _ in range(2)]
    await eventually(lambda: pool.waiters.count == 1)
    await asyncio.wait_for(pool.close(), LIMIT_S)
    async with asyncio.timeout(LIMIT_S):
        answers = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(answer, Fault) for answer in answers), answers
    assert (pool.waiters.is_closed, pool.waiters.count) == (True, 0)

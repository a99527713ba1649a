"""The runtime's handle of an isolate, whose CPU time and memory the test sets."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from pilotlight.functions.channel import frames
from pilotlight.functions.channel.connection import Channel
from pilotlight.functions.channel.streams import Inbound
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.host.invocations.invocation import Invocation
from pilotlight.functions.host.isolates.isolate_handle import IsolateHandle
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.host.response_stream import StreamThrottle
from pilotlight.functions.sandbox.limits import FunctionLimits
from pilotlight.functions.sandbox.priority import PriorityClass
from pilotlight.functions.sandbox.zygotes.control_messages import Boot
from pilotlight.functions.sandbox.zygotes.zygote_client import ChildProcess, ZygoteError

LIMITS = FunctionLimits(cpu_ms=200, memory_mib=64, idle_look_s=0.0)


class FakeChild(ChildProcess):
    def __init__(self) -> None:
        super().__init__()
        self.pidfd = 0
        self.cpu, self.memory = 0.0, 1
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def set_priority(self, priority_class: PriorityClass) -> None:
        pass

    def cpu_s(self) -> float:
        return self.cpu

    def memory_mib(self) -> int:
        return self.memory


class FakeZygote:
    """A zygote whose isolate is this process: it records requests, and answers only pings."""

    why_failed = ""

    def __init__(self) -> None:
        self.child = FakeChild()
        self.asked = asyncio.Event()
        self.socket: socket.socket | None = None

    def fork(self, boot: Boot, fds: list[int]) -> ChildProcess:
        self.socket = socket.socket(fileno=socket.dup(fds[0]))
        return self.child

    async def answer(self, frame: frames.Request, body: Inbound | None) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


class Made:
    def __init__(self, isolate: IsolateHandle, zygote: FakeZygote, channel: Channel) -> None:
        self.isolate, self.child, self.channel, self.asked = isolate, zygote.child, channel, zygote.asked

    async def ask(self, wall_s: float = 60.0) -> Any:
        self.isolate.limits = replace(self.isolate.limits, wall_s=wall_s)
        event = frames.FetchEvent(frames.UNNUMBERED, "GET", "http://host/")
        return await self.isolate.ask(event, invocation=Invocation(1, event, lambda ended: None))


@pytest.fixture
async def made() -> AsyncIterator[Made]:
    async def on_subrequest(frame: frames.Request, body: Inbound | None) -> Any:
        raise AssertionError

    zygote = FakeZygote()
    isolate = IsolateHandle("f", LIMITS, on_subrequest, FunctionLog("f", 256), StreamThrottle(1e6))
    await isolate.start(zygote, None)
    assert zygote.socket is not None
    channel = await Channel.open(zygote.socket, zygote.answer, is_runtime=False)
    isolate.is_ready = True
    yield Made(isolate, zygote, channel)
    channel.close("the test is over")
    if not zygote.child.died.done():
        zygote.child.died.set_result(None)
    await isolate.close()


async def test_an_isolate_is_ended_by_its_watch_when_it_has_more_memory_than_it_may(made: Made) -> None:
    made.child.memory = LIMITS.memory_mib
    made.isolate.watch()
    assert made.isolate.is_usable
    made.child.memory += 1
    made.isolate.watch()
    fault = await made.isolate.exit_fault()
    assert (fault.code, "65 MiB of memory, of at most 64" in fault.message) == ("memory", True)
    assert made.child.signals[-1] == signal.SIGKILL
    assert not made.isolate.is_usable
    made.isolate.watch()
    made.isolate.watch_idle()
    assert made.child.signals.count(signal.SIGKILL) == 1, "killed once"


async def test_an_isolate_without_a_request_may_not_compute_for_ever(made: Made) -> None:
    for cpu in (0.15, 0.2):
        made.child.cpu = cpu
        made.isolate.watch_idle()
        assert made.isolate.is_usable
    made.child.cpu = 0.35
    made.isolate.watch_idle()
    assert "200 ms of CPU time while it had no request" in (await made.isolate.exit_fault()).message


async def test_requests_of_an_isolate_that_dies_are_open_no_longer(made: Made) -> None:
    asking = asyncio.ensure_future(made.ask())
    await made.asked.wait()
    assert made.isolate.work.load == 1
    made.child.died.set_result(None)
    made.channel.close("it died")
    with pytest.raises(Fault, match="ended for an unknown reason"):
        await asking
    assert made.isolate.work.load == 0


async def test_an_isolate_that_could_not_be_made_says_why(made: Made) -> None:
    made.child.started.set_exception(ZygoteError("clone: Resource temporarily unavailable"))
    made.child.died.set_result(None)
    made.channel.close("it was never there")
    with pytest.raises(Fault, match="cannot be started: clone: Resource"):
        await made.ask()


async def test_a_request_beyond_its_wall_time_is_open_no_longer(made: Made) -> None:
    with pytest.raises(Fault, match=r"did not answer within 0\.01 s"):
        await made.ask(wall_s=0.01)
    assert made.isolate.work.load == 0

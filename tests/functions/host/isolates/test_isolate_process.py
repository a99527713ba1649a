"""The description of an isolate's exit."""

import asyncio
import os
import signal

from pilotlight.functions.host.isolates.isolate_process import IsolateProcess
from pilotlight.functions.host.logs import FunctionLog
from pilotlight.functions.sandbox.priority import CpuHistory
from pilotlight.functions.sandbox.zygotes.control_messages import Died
from pilotlight.functions.sandbox.zygotes.zygote_client import ChildProcess


async def test_a_death_reported_before_the_start_is_described_by_its_signal() -> None:
    """A zygote's report of a death may arrive before its report of the start."""
    log = FunctionLog("f", 64)
    try:
        process = IsolateProcess("f", log, CpuHistory())
        process.child = ChildProcess()
        process.child.ended(Died(1, signal.SIGSEGV, 0.0, 0))
        fault = await asyncio.wait_for(process.crash_fault("", was_ready=True), 60)
        assert "was killed by signal 11" in fault.message
    finally:
        log.close()
        log.close_write_end()


async def test_it_runs_from_its_start_to_its_death() -> None:
    """A process may be signalled or measured only while it runs, because its pid may be reused afterwards."""
    log = FunctionLog("f", 64)
    try:
        process = IsolateProcess("f", log, CpuHistory())
        assert not process.is_running
        process.child = child = ChildProcess()
        assert not process.is_running
        child.pidfd, child.pid = os.pidfd_open(os.getpid()), os.getpid()
        assert process.is_running
        child.ended(None)
        assert not process.is_running
    finally:
        log.close()
        log.close_write_end()

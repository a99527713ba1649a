"""An isolate whose process is stopped by a signal: another one answers the requests that may be repeated."""

import os
import signal

import pytest

from pilotlight.functions.host.faults import Fault
from tests.functions.conftest import Served

SOURCE = """
import os, signal
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        if request.url.endswith("/itself"):
            os.kill(os.getpid(), signal.SIGSTOP)
        return Response("well")
"""


async def stop_the_isolate(served: Served) -> None:
    assert await served.get() == b"well"
    (isolate,) = served.functions.pools["f"].isolates.living
    assert isolate.process.child is not None
    os.kill(isolate.process.child.pid, signal.SIGSTOP)


async def test_a_get_of_a_stopped_isolate_is_answered_by_another_one(served: Served) -> None:
    served.add(SOURCE)
    await stop_the_isolate(served)
    assert await served.get() == b"well"
    pool = served.functions.pools["f"]
    assert (pool.num_failed, pool.isolates.num_started) == (0, 2)


async def test_a_post_fails_with_the_reason_since_it_may_have_been_carried_out(served: Served) -> None:
    served.add(SOURCE)
    await stop_the_isolate(served)
    with pytest.raises(Fault, match="a signal stopped its process for more than 1 s") as fault:
        await served.ask(method="POST", body=b"x")
    assert (fault.value.code, served.functions.pools["f"].num_failed) == ("stopped", 1)


async def test_a_function_that_stops_itself_is_tried_twice_and_not_for_ever(served: Served) -> None:
    served.add(SOURCE)
    with pytest.raises(Fault, match="a signal stopped its process"):
        await served.get("/itself")
    pool = served.functions.pools["f"]
    assert (pool.num_failed, pool.isolates.num_started) == (1, 2)

"""Functions in real isolates: what goes in, what comes out."""

import asyncio
import os

import pytest

from runtime.functions.pool import FIRST_PAUSE_S, FREE_DEATHS
from runtime.functions.priority import OWN_NICE, YIELD_NICE
from runtime.functions.worker import Fault
from tests.runtime.functions.conftest import Served


async def test_a_function_answers(served: Served) -> None:
    served.add(
        """
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                return Response(f"hello from {request.url}")
        """
    )
    assert await served.get("/x?y=1") == b"hello from http://host/x?y=1"
    assert await asyncio.gather(*(served.get(f"/{i}") for i in range(20)))
    assert served.functions.pools["f"].num_started == 1


async def test_who_comes_after_an_isolate_that_died_gives_way_from_its_birth(served: Served) -> None:
    served.add(
        """
        import os
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                if request.url.endswith("/die"):
                    os._exit(1)
                return Response(str(os.getpriority(os.PRIO_PROCESS, 0)))
        """
    )
    own = OWN_NICE
    assert int(await served.get("/")) == own
    with pytest.raises(Fault):
        await served.get("/die")
    await served.get("/")  # by whose answer the next one's birth is known
    assert int(await served.get("/")) == min(19, own + YIELD_NICE)
    assert os.getpriority(os.PRIO_PROCESS, 0) <= own


async def test_isolates_that_die_one_after_the_other_are_replaced_ever_more_slowly_until_one_answers(
    served: Served,
) -> None:
    served.add(
        """
        import os
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                if request.url.endswith("/die"):
                    os._exit(1)
                return Response("well")
        """
    )
    pool = served.functions.pools["f"]
    for _ in range(FREE_DEATHS - 1):
        with pytest.raises(Fault):
            await served.get("/die")
    assert pool._pause_s() <= 0
    for _ in range(2):
        with pytest.raises(Fault):
            await served.get("/die")
    assert 0 < pool._pause_s() <= 2 * FIRST_PAUSE_S
    assert await served.get("/") == b"well"  # it waits, and is answered
    with pytest.raises(Fault):
        await served.get("/die")
    assert pool._pause_s() <= 0

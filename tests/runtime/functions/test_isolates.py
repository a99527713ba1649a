"""Functions in real isolates: what goes in, what comes out."""

import asyncio

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

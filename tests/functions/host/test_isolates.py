"""Functions in real isolates: requests and responses."""

import asyncio
import json
import os
import time

import pytest

from pilotlight.functions.host.faults import Fault
from pilotlight.functions.sandbox.priority import OWN_NICE, YIELD_NICE
from pilotlight.functions.sandbox.processes import descendants
from tests.asgi import eventually
from tests.functions.conftest import Served, ServedMaker
from tests.functions.host.test_zygotes import zygote_pid


@pytest.mark.long
async def test_a_function_has_its_zygote_before_its_first_request(make_served: ServedMaker) -> None:
    async with make_served(zygotes_mib=1024) as served:
        served.add("from workers import *\n")
        pool = served.functions.pools["f"]
        await eventually(lambda: pool.factory.zygote.current is not None)
        assert pool.isolates.num_started == 0


@pytest.mark.long
async def test_a_request_is_answered_by_an_isolate_that_was_forked_before_it_and_imports_the_module_then(
    make_served: ServedMaker,
) -> None:
    async with make_served(limits={"idle_s": 0.05}) as served:
        served.add(
            """
            import time
            from workers import WorkerEntrypoint, Response
            IMPORTED_AT = time.time()

            class Default(WorkerEntrypoint):
                async def fetch(self, request):
                    return Response(str(IMPORTED_AT))
            """
        )
        pool = served.functions.pools["f"]

        used: set[int] = set()

        def forked() -> set[int]:
            zygote = pool.factory.zygote.current
            has_reported = zygote is not None and zygote.can_fork
            return descendants(zygote_pid(served, "f")) - used if has_reported else set()

        for _ in range(2):
            await eventually(forked)
            (spare,) = forked()
            used.add(spare)
            asked_at = time.time()
            assert float(await served.get("/")) >= asked_at
            child = pool.isolates.living[0].process.child
            assert child is not None
            assert child.pid == spare
            await eventually(lambda: not pool.isolates.living)


async def test_isolates_share_cores_with_the_site_by_nice_values_so_they_are_in_its_session_and_cannot_leave_it(
    served: Served,
) -> None:
    served.add(
        """
        import os
        from workers import WorkerEntrypoint, Response

        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                try:
                    os.setsid()
                except PermissionError:
                    return Response("stays")
                return Response("has left")
        """
    )
    assert await served.get("/") == b"stays"
    child = served.functions.pools["f"].isolates.living[0].process.child
    assert child is not None
    assert os.getsid(child.pid) == os.getsid(0)
    assert os.getpgid(child.pid) != os.getpgid(0)  # a signal from the terminal reaches only the site


async def test_the_successor_of_an_isolate_that_died_has_low_priority_from_its_start(served: Served) -> None:
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
    await served.get("/")  # its answer shows that the next isolate has started
    assert int(await served.get("/")) == min(19, own + YIELD_NICE)
    assert os.getpriority(os.PRIO_PROCESS, 0) <= own


async def test_an_isolate_that_ran_out_of_memory_is_replaced_and_loses_no_other_request(
    make_served: ServedMaker,
) -> None:
    async with make_served(limits={"blocked_s": 20.0}) as served:  # on a busy machine filling the memory takes long
        served.add(
            """
            import asyncio, os
            from workers import WorkerEntrypoint, Response

            class Default(WorkerEntrypoint):
                async def fetch(self, request):
                    if request.url.endswith("/hoard"):
                        hoard = []
                        while True:
                            hoard.append(bytearray(1 << 20))
                    if request.url.endswith("/slow"):
                        await asyncio.sleep(0.5)
                    return Response(str(os.getpid()))
            """
        )
        first = await served.get()
        slow = asyncio.create_task(served.get("/slow"))
        (isolate,) = served.functions.pools["f"].isolates.living
        await eventually(lambda: isolate.work.load == 1)
        with pytest.raises(Fault, match=r"MemoryError|memory"):
            await served.get("/hoard")
        assert await slow == first
        assert await served.get() != first


async def test_a_syntax_error_is_shown_once_and_without_our_frames(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    served.add("def broken(:\n    pass\n")
    with caplog.at_level("INFO", "pilotlight.function"), pytest.raises(Fault) as told:
        await served.get()
    assert "def broken(:" in told.value.detail
    assert "importlib" not in told.value.detail
    assert "isolate_main" not in told.value.detail
    assert caplog.text.count("def broken(:") == 1


async def test_memory_that_runs_out_is_named_with_its_limit(served: Served) -> None:
    served.add(
        """
        from workers import Response, WorkerEntrypoint
        class Default(WorkerEntrypoint):
            async def fetch(self, request):
                return Response(str(len(bytearray(1 << 30))))
        """
    )
    with pytest.raises(Fault, match="a function may use 160 MiB of memory") as told:
        await served.get()
    assert "bytearray(1 << 30)" in told.value.detail


BEGINNING = """
import json, os, sys, threading
from workers import Response, WorkerEntrypoint
OURS = ("pilotlight",)
FOUND = sorted(name for name in sys.modules if name.partition(".")[0] in OURS)
class Default(WorkerEntrypoint):
    async def fetch(self, request):
        told = {"stack": threading.stack_size(), "ours": FOUND, "env": sorted(os.environ), "stdin": os.read(0, 1).decode()}
        for name in OURS:
            try:
                __import__(name)
            except ImportError:
                told[name] = "is not here"
        return Response(json.dumps(told))
"""


async def test_a_function_begins_without_anything_of_the_sites_and_with_small_stacks(served: Served) -> None:
    served.add(BEGINNING)
    told = json.loads(await served.get())
    assert (told.pop("stack"), told.pop("ours"), told.pop("stdin")) == (1 << 20, [], "")
    assert set(told.pop("env")) <= {
        "HOME", "LANG", "LC_CTYPE", "MALLOC_ARENA_MAX", "REQUESTS_CA_BUNDLE", "SSL_CERT_DIR", "SSL_CERT_FILE", "TMPDIR", "TZ",
    }  # fmt: skip
    assert set(told.values()) == {"is not here"}
    assert len(told) == 1

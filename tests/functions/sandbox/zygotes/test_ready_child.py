"""The child that the site's zygote forks ahead: the next function's zygote."""

import os
import signal

import pytest

from pilotlight.functions.sandbox.processes import descendants, has_ended
from tests.asgi import eventually
from tests.functions.conftest import ServedMaker
from tests.functions.host.test_hostile import GOOD
from tests.functions.host.test_zygotes import zygote_pid


@pytest.mark.parametrize("tier", [1, 2])
async def test_a_functions_zygote_is_forked_before_it_is_needed_and_on_demand_if_that_one_died(
    make_served: ServedMaker, tier: int
) -> None:
    others = descendants(os.getpid())

    def found() -> set[int]:
        return descendants(os.getpid()) - others

    async with make_served(tier=tier, zygotes_mib=0) as served:
        await eventually(lambda: len(found()) == 2)
        (site,) = (pid for pid in found() if descendants(pid))
        (ready,) = found() - {site}
        served.add(GOOD, "first")
        assert await served.get(name="first") == b"well"
        assert zygote_pid(served, "first") == ready
        used = descendants(ready) | {ready}
        await eventually(lambda: len(found() - used) == 2)
        (next_one,) = found() - used - {site}
        process = os.pidfd_open(next_one)
        signal.pidfd_send_signal(process, signal.SIGKILL)
        await eventually(lambda: has_ended(process))
        os.close(process)
        served.add(GOOD, "second")
        assert await served.get(name="second") == b"well"
        assert zygote_pid(served, "second") not in (0, next_one)
        pool = served.functions.pools["second"]
        await pool.close()
        await eventually(lambda: not os.path.exists(f"/proc/{next_one}"))
    await eventually(lambda: not found())

"""A group of ranks soon reports a rank that is killed, crashes or is stopped, by name."""

import os
import signal

import pytest

from pilotlight.engine.api.errors import RankLostError
from pilotlight.engine.parallel.orders import DropModel
from pilotlight.engine.parallel.ranks import RankGroup, is_suspended
from tests.engine.parallel.test_ranks import group_memory, group_of
from tests.waiting import until

pytestmark = pytest.mark.process


def send_until_lost(group: RankGroup) -> RankLostError:
    """Send orders, each larger than the buffer of a socket, until one fails; return the error."""
    try:
        while True:
            group.send(DropModel("none" * 100_000))
    except RankLostError as error:
        return error


@pytest.mark.parametrize(("blow", "was_killed"), [(signal.SIGKILL, True), (signal.SIGSEGV, False)])
def test_an_order_to_a_rank_that_is_gone_says_whether_it_was_killed(blow: signal.Signals, was_killed: bool) -> None:
    with group_memory(group_of(2)) as memory:
        assert isinstance(memory.group, RankGroup)
        (pid,) = memory.group.pids
        os.kill(pid, blow)
        error = send_until_lost(memory.group)
        assert (str(error), error.was_killed) == (f"rank 1 (pid {pid}) ended with status {-blow}", was_killed)


def test_a_rank_that_is_stopped_holds_up_the_orders_for_a_few_seconds_only(caplog: pytest.LogCaptureFixture) -> None:
    with group_memory(group_of(2)) as memory:
        assert isinstance(memory.group, RankGroup)
        (pid,) = memory.group.pids
        os.kill(pid, signal.SIGSTOP)
        until(lambda: is_suspended(pid))
        error = send_until_lost(memory.group)
        assert error.was_killed, "a stopped rank must not be blamed on a request"
        assert f"rank 1 (pid {pid}) was stopped for 5 s; it is killed" in caplog.text


def test_an_order_is_packed_once_for_all_ranks() -> None:
    with group_memory(group_of(3)) as memory:
        assert isinstance(memory.group, RankGroup)
        num_packed = 0

        class Counted(DropModel):
            def __reduce__(self) -> tuple[object, ...]:
                nonlocal num_packed
                num_packed += 1
                return DropModel, tuple(self)

        memory.group.send(Counted("none"))
        assert num_packed == 1

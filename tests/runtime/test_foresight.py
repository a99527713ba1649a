"""Replicas that wake and sleep at a site whose hosts have roles and work."""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from pilotlight.runtime.hosts.prewaking import Foresight
from pilotlight.runtime.models.wakes import Waker


def replicas_of(*roles: str) -> list[Any]:
    return [SimpleNamespace(host=SimpleNamespace(index=i, role=role), is_awake=True) for i, role in enumerate(roles)]


class Suits(NamedTuple):
    rank: int
    device_index: int


class Budget:
    def __init__(self, suits: Suits) -> None:
        self.slept: list[object] = []
        self._suits = suits

    def suitability(self, state: object) -> Suits:
        return self._suits

    async def put_to_sleep(self, state: object) -> None:
        self.slept.append(state)


def woken(roles: tuple[str, ...], ranks: tuple[int, ...]) -> int:
    """Return the index of the host on which a model wakes, given the role and the rank of each host."""
    started: list[int] = []
    budgets = [Budget(Suits(rank, index)) for index, rank in enumerate(ranks)]
    nothing = cast("Any", None)
    replicas = replicas_of(*roles)
    for index, replica in enumerate(replicas):
        replica.start_waking = lambda wake, index=index: (wake.close(), started.append(index))
    waker = Waker(cast("Any", budgets), nothing, nothing, nothing, nothing, nothing)
    waker.begin(cast("Any", SimpleNamespace(replicas=replicas, history=SimpleNamespace())))
    (index,) = started
    return index


def test_a_model_wakes_first_where_it_can_be_answered() -> None:
    assert woken(("prefill", "decode"), (0, 9)) == 1
    assert woken(("prefill", "both", "decode"), (0, 9, 8)) == 2
    assert woken(("prefill", "prefill"), (5, 4)) == 1, "where none answers, none is passed over"


async def test_a_copy_that_has_work_again_is_not_put_to_sleep() -> None:
    idle, busy, asleep = replicas_of("both", "both", "both")
    asleep.is_awake = False
    state = SimpleNamespace(awake=[idle, busy, asleep], is_replica_busy=lambda replica: replica is busy)
    budgets, nothing = [Budget(Suits(0, index)) for index in range(3)], cast("Any", None)
    await Foresight([], cast("Any", budgets), nothing, nothing, nothing)._put_to_sleep(cast("Any", state))
    assert [len(budget.slept) for budget in budgets] == [1, 0, 0]

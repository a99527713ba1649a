"""Schedules of requests and faults, drawn from a seed, and the promises that the product must keep under each.

A schedule is a value: it can be printed, run again, and run with some of its faults.
"""

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

from pilotlight.wire.hop.headers import HOP_SECRET_ENV
from tests.simulation.faults import FAULTS, PlannedFault
from tests.simulation.virtual_network import Network
from tests.simulation.virtual_time import BusyLoopError, NothingToRunError, virtual_time
from tests.simulation.world import SECRET, SITES, Heard, Kind, World, adapted, new_world, noting_exceptions

REQUESTS_FOR_S = 4.0
FAULTS_FOR_S = 8.0
# An upper bound on the duration of a request: three tries of 60 s, three lost sites of 30 s, and the longest fault.
ENDS_WITHIN_S = 400.0
SETTLED_S = 10.0  # most time after the last request until every count is zero
STOPS_WITHIN_S = 60.0
SHORT = 1_000_000_294  # the seed of the first of four answers with 12 to 16 tokens
# Error codes that a request may end with if no site could answer it.
HONEST = frozenset({"no_site_available", "upstream_lost", "overloaded", "draining", "engine_error", "request_timeout",
                    "model_load_failed", "upstream_timeout", "request_failed"})  # fmt: skip


class PlannedRequest(NamedTuple):
    at_s: float
    seed: int
    kind: Kind
    num_words: int
    leaves_after_s: float | None


@dataclass(frozen=True)
class Schedule:
    seed: int
    devices: int  # number of devices of ams1; the other sites have one
    spared: str | None  # a site without faults, if any: then no request may fail
    requests: tuple[PlannedRequest, ...]
    faults: tuple[PlannedFault, ...]


def draw(seed: int) -> Schedule:
    chance = random.Random(seed)
    spared = chance.choice([None, *SITES])
    struck = [name for name in SITES if name != spared]
    planned = (
        PlannedFault(
            round(chance.uniform(0.2, FAULTS_FOR_S), 3),
            chance.choice(list(FAULTS)),
            chance.choice(struck),
            round(chance.choice([0.3, 2.0, 8.0, 20.0]) * chance.uniform(0.5, 1.5), 3),
        )
        for _ in range(chance.randrange(1, 8))
    )
    requests = (
        PlannedRequest(
            round(chance.uniform(0.0, REQUESTS_FOR_S), 3),
            1000 * (seed % 1_000_000) + number,
            "whole" if chance.random() < 0.25 else "stream",
            chance.choice([3, 16, 350]),
            round(chance.uniform(0.0, 3.0), 3) if chance.random() < 0.25 else None,
        )
        for number in range(chance.randrange(6, 15))
    )
    devices = chance.choice([1, 2])
    return Schedule(seed, devices, spared, tuple(sorted(requests)), tuple(sorted(planned)))


def run(
    schedule: Schedule, on_step: Callable[[str], None] = lambda step: None, heard_by: type[Heard] = Heard
) -> list[str]:
    """Run a schedule; return a sentence for each broken promise.

    `on_step` gets a line for each delivery of bytes, `heard_by` reads the responses.
    """
    network = Network(on_step)
    with virtual_time(network, schedule.seed), patch.dict("os.environ", {HOP_SECRET_ENV: SECRET}), adapted():
        world = new_world(network, devices=schedule.devices, heard_by=heard_by)
        with noting_exceptions(world):
            try:
                broken = network.run_until_complete(_run(world, schedule))
            except (NothingToRunError, BusyLoopError) as error:
                broken = [f"{type(error).__name__} {error}"]
            gc.collect()  # logs the exceptions of tasks that were not awaited
        return [*broken, *world.answers.broken, *network.failures, *world.logged]


async def _run(world: World, schedule: Schedule) -> list[str]:
    network = world.network
    for member in world.members:
        member.start()
    if not await world.until_healthy():
        return [f"the network did not start: {world.router.states()}"]
    began = network.now
    under_way = [
        *(asyncio.ensure_future(_request(world, planned, began)) for planned in schedule.requests),
        *(asyncio.ensure_future(_fault(world, planned, began)) for planned in schedule.faults),
    ]
    _, late = await asyncio.wait(under_way, timeout=ENDS_WITHIN_S)
    broken = [f"a request has no end: {heard}" for heard in world.heard if heard.ended_at is None]
    for task in late:
        task.cancel()
    broken += [sentence for heard in world.heard for sentence in _wrong(heard, world, schedule)]
    world.heal()
    if not await world.until_healthy():
        return [*broken, f"the network does not recover: {world.router.states()}"]
    again = [world.ask(SHORT + number, "stream", 16) for number in range(4)]
    await asyncio.wait(again, timeout=ENDS_WITHIN_S)
    unwell = [heard for heard in world.heard[-len(again) :] if not _is_whole(heard, world)]
    broken += [f"after recovery a request fails: {heard}" for heard in unwell]
    return [*broken, *await _unsettled(world), *await _stopped(world)]


async def _unsettled(world: World) -> list[str]:
    """Wait until no member holds unfinished work; return a sentence for each count that does not become zero in time."""
    deadline = world.network.now + SETTLED_S
    while held := [sentence for member in world.members for sentence in member.held()]:
        if world.network.now > deadline:
            break
        await asyncio.sleep(0.25)
    return held


async def _request(world: World, planned: PlannedRequest, began: float) -> None:
    await asyncio.sleep(began + planned.at_s - world.network.now)
    task = world.ask(planned.seed, planned.kind, planned.num_words)
    await asyncio.wait({task}, timeout=planned.leaves_after_s)
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


async def _fault(world: World, planned: PlannedFault, began: float) -> None:
    await asyncio.sleep(began + planned.at_s - world.network.now)
    await FAULTS[planned.name](world, planned)


def _is_whole(heard: Heard, world: World) -> bool:
    return heard.is_complete and heard.finish == "stop" and heard.text.strip() == world.answers.text(heard.seed).strip()


def _wrong(heard: Heard, world: World, schedule: Schedule) -> Iterator[str]:
    """Yield a sentence for each error in one answer."""
    expected = world.answers.text(heard.seed)
    if not expected.strip().startswith(heard.text.strip()):
        yield f"the answer {heard.seed} has other text: {heard.text!r}, not {expected!r}"
    if heard.has_left or _is_whole(heard, world):
        return
    if heard.is_complete:
        yield f"the answer {heard.seed} ended early, but looks complete to its client: {heard}"
    elif heard.cut is not None or heard.error is None:
        yield f"the answer {heard.seed} was cut: {heard}"
    elif heard.error is not None and heard.error not in HONEST:
        yield f"the request {heard.seed} ended with {heard.error!r}: {heard}"
    elif schedule.spared is not None and heard.error is not None and not _may_fail(heard, schedule):
        yield f"the request {heard.seed} failed, though {schedule.spared} was well: {heard}"


def _may_fail(heard: Heard, schedule: Schedule) -> bool:
    """Tell whether a request may fail although one site had no fault: it is refused after two hosts crashed in a step with it."""
    return heard.error == "request_failed" and sum("crash" in fault.name for fault in schedule.faults) > 1


async def _stopped(world: World) -> list[str]:
    """Stop every process as an operator does; return a sentence for each task that does not end."""
    members = world.members
    for member in members:
        member.stop.set()
    served = {member.served for member in members if member.served is not None}
    await asyncio.wait(served, timeout=STOPS_WITHIN_S)
    await asyncio.sleep(1.0)
    return [
        f"{member.name} does not stop: {task!r}"
        for member in members
        for task in member.process.tasks.values()
        if not task.done()
    ]

"""The faults of a schedule: each affects a site or the router, and ends after its duration.

A fault has no effect if its target is not running.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tests.simulation.engine_double import EngineDouble
from tests.simulation.world import ROUTER_HOST, Member, SiteMember, World

SLOW_S = 2.0  # added to the latency of a slow link, in each direction
CLOCK_STEPS_S = (-4000.0, -70.0, -20.0, 20.0, 70.0, 4000.0)


class PlannedFault(NamedTuple):
    at_s: float
    name: str
    site: str
    lasts_s: float


Fault = Callable[[World, PlannedFault], Awaitable[None]]


async def _kill_site(world: World, planned: PlannedFault) -> None:
    site = world.sites[planned.site]
    site.kill()
    await asyncio.sleep(planned.lasts_s)
    site.start()


async def _drain_site(world: World, planned: PlannedFault) -> None:
    site = world.sites[planned.site]
    if site.is_up and site.served is not None:
        site.stop.set()
        await asyncio.wait({site.served})
        await asyncio.sleep(planned.lasts_s)
        site.start()


async def _kill_engine(world: World, planned: PlannedFault) -> None:
    for host in _engines(world, planned)[:1]:
        host.kill()


async def _kill_engines_again(world: World, planned: PlannedFault) -> None:
    """Kill every engine host of the site, and twice more those that replace them."""
    for _ in range(3):
        for host in _engines(world, planned):
            host.kill()
        await asyncio.sleep(planned.lasts_s / 3)


async def _crash_engine(world: World, planned: PlannedFault) -> None:
    for host in _engines(world, planned)[:1]:
        host.crash()


async def _suspend_engine(world: World, planned: PlannedFault) -> None:
    for host in _engines(world, planned)[:1]:
        world.network.suspend(host.process)
        await asyncio.sleep(planned.lasts_s)
        world.network.resume(host.process)


async def _suspend_site(world: World, planned: PlannedFault) -> None:
    await _suspended(world, world.sites[planned.site], planned)


async def _suspend_router(world: World, planned: PlannedFault) -> None:
    await _suspended(world, world.router, planned)


async def _suspended(world: World, member: Member, planned: PlannedFault) -> None:
    process = member.process
    world.network.suspend(process)
    await asyncio.sleep(planned.lasts_s)
    world.network.resume(process)


async def _cut_link(world: World, planned: PlannedFault) -> None:
    link = world.network.link(ROUTER_HOST, world.sites[planned.site].host)
    world.network.cut(link)
    await asyncio.sleep(planned.lasts_s)
    world.network.mend(link)


async def _slow_link(world: World, planned: PlannedFault) -> None:
    link = world.network.link(ROUTER_HOST, world.sites[planned.site].host)
    link.latency_s += SLOW_S
    await asyncio.sleep(planned.lasts_s)
    link.latency_s -= SLOW_S


async def _step_site_clock(world: World, planned: PlannedFault) -> None:
    world.sites[planned.site].step_clock(random.choice(CLOCK_STEPS_S))


async def _step_router_clock(world: World, planned: PlannedFault) -> None:
    world.router.step_clock(random.choice(CLOCK_STEPS_S))


async def _refuse_sequences(world: World, planned: PlannedFault) -> None:
    await _without_room(world.sites[planned.site], planned, fails_loads=False)


async def _fail_loads(world: World, planned: PlannedFault) -> None:
    """Kill the engine hosts, and let their successors fail to load models for lack of memory."""
    await _without_room(world.sites[planned.site], planned, fails_loads=True)


async def _without_room(site: SiteMember, planned: PlannedFault, *, fails_loads: bool) -> None:
    for launcher in site.launchers:
        launcher.have_no_room("overloaded", fails_loads=fails_loads)
        for host in launcher.living if fails_loads else ():
            host.kill()
    await asyncio.sleep(planned.lasts_s)
    for launcher in site.launchers:
        launcher.have_no_room(None, fails_loads=False)


async def _clients_leave(world: World, planned: PlannedFault) -> None:
    for task in world.asking[::2]:
        task.cancel()


def _engines(world: World, planned: PlannedFault) -> list[EngineDouble]:
    site = world.sites[planned.site]
    return [host for launcher in site.launchers for host in launcher.living] if site.is_up else []


FAULTS: dict[str, Fault] = {
    "kill the site": _kill_site,
    "drain the site": _drain_site,
    "kill an engine host": _kill_engine,
    "kill the engine hosts three times": _kill_engines_again,
    "crash an engine host": _crash_engine,
    "suspend an engine host": _suspend_engine,
    "suspend the site": _suspend_site,
    "suspend the router": _suspend_router,
    "cut the link": _cut_link,
    "slow the link": _slow_link,
    "step the site's clock": _step_site_clock,
    "step the router's clock": _step_router_clock,
    "refuse sequences": _refuse_sequences,
    "fail loads": _fail_loads,
    "half of the clients leave": _clients_leave,
}

"""One run: a policy, a trace and a world, from a seed to figures. The event loop of the simulation.

Clients are closed loops (a turn follows the answer before it), sessions arrive openly. Equal seeds replay exactly: events of one moment keep the
order in which they were made, and no clock of the machine is read but for the run's own speed.
"""

import heapq
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from edge_router.backend import Ticket
from edge_router.policy import Policy
from edge_router.session import Conversation
from load_tests.sim.cities import City, load_cities
from load_tests.sim.router import KEPT_PUBLICATIONS, Publication, SimRouter
from load_tests.sim.site import SimSite
from load_tests.sim.traces import Session, Trace, Turn, matched, sessions, uncached_per_session
from load_tests.sim.world import REGION_MS, World, build_world

PUBLISH_S = 1.0
PREFIXES_EVERY = 10  # publications: digests change slowly
MAX_TRIES = 3
CONNECT_TIMEOUT_S = 2.0
MOVES = 0.02  # of turns whose client has moved to another router: a phone that changes its network, a router that was restarted


@dataclass(slots=True)
class Call:
    """One turn on its way."""

    session: Session
    turn: Turn
    router: SimRouter
    began: float
    tried: list[str] = field(default_factory=list)
    site: int = -1
    life: int = 0
    cached: int = 0
    scope: AbstractContextManager[Ticket] | None = None
    ticket: Ticket | None = None
    is_dead: bool = False


@dataclass(slots=True)
class Outcome:
    policy: str
    trace: str
    requests: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    hit_ratio: float  # of prompt tokens, among answered requests
    bound: float  # the same, were every site's cache one and infinite
    shed: float  # share of requests that no site took
    cross_region: float
    retried: float
    cut: int  # streams whose site crashed under them
    events: int
    wall_s: float
    reasons: dict[str, int]

    @property
    def of_bound(self) -> float:
        return self.hit_ratio / self.bound if self.bound else 1.0


class Simulation:
    def __init__(
        self, make_policy: Callable[[], Policy], trace: Trace, world: World, arrivals: list[Session], seed: int
    ) -> None:
        self.now = 0.0
        self.world = world
        self.sites = [SimSite(spec) for spec in world.sites]
        self.routers = [SimRouter(i, world, self.sites, make_policy(), self._clock) for i in range(len(world.routers))]
        self.published: list[list[Publication]] = [[] for _ in self.sites]
        self.seed = seed
        self.trace = trace
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self._live: list[dict[int, Call]] = [{} for _ in self.sites]  # by id, waiting and decoding
        self._ever: set[bytes] = set()
        self.ttft: list[float] = []
        self.prompt = self.cached = self.ideal = 0
        self.shed = self.cross = self.retried = self.cut = self.requests = self.events = 0
        self.reasons: dict[str, int] = {}
        self.open_calls = 0
        self.left = len(arrivals)
        for session in arrivals:
            self.at(session.starts_at, self._next_turn, session)
        for i in range(len(self.sites)):
            self.at(PUBLISH_S * i / len(self.sites), self._publish, i)
        for outage in world.outages:
            if not outage.routers:
                self.at(outage.begins, self._crash, outage.site)
                self.at(outage.ends, self._revive, outage.site)

    def _clock(self) -> float:
        return self.now

    def at(self, when: float, what: Callable[..., None], argument: Any) -> None:
        self._order += 1
        heapq.heappush(self._heap, (when, self._order, what, argument))

    def run(self, max_requests: int) -> None:
        heap = self._heap
        while heap and (self.left or self.open_calls) and self.requests < max_requests:
            self.now, _, what, argument = heapq.heappop(heap)
            self.events += 1
            what(argument)

    def _next_turn(self, session: Session) -> None:
        turn = next(session.turns, None)
        if turn is None:
            self.left -= 1
            return
        self.requests += 1
        home = self.world.router_of_city[session.city]
        draw = hash((self.seed, session.number, len(turn.prefixes))) % 10_000
        router = (home + 1 + draw % (len(self.routers) - 1)) % len(self.routers) if draw < 10_000 * MOVES else home
        self.open_calls += 1
        call = Call(session, turn, self.routers[router], self.now)
        self.at(self.now + self.world.access_s[session.city] / 2, self._dispatch, call)

    def _dispatch(self, call: Call) -> None:
        turn = call.turn
        if len(call.tried) >= MAX_TRIES:
            return self._give_up(call)
        choice = call.router.decide(
            Conversation(None, turn.prefixes, turn.prompt_tokens), call.tried, self.now, self.published
        )
        if choice is None:
            return self._give_up(call)
        request, preference = choice
        self.reasons[preference.reason] = self.reasons.get(preference.reason, 0) + 1
        call.site = call.router.index[preference.backend.name]
        call.tried.append(preference.backend.name)
        if len(call.tried) > 1:
            self.retried += 1
        call.scope, call.ticket = call.router.send(
            call.site, turn.prompt_tokens - preference.backend.cached_tokens(request)
        )
        if call.router.reaches(call.site, self.now):
            self.at(self.now + self._path(call) / 2, self._arrive, call)
        else:
            self.at(self.now + CONNECT_TIMEOUT_S, self._unreachable, call)

    def _arrive(self, call: Call) -> None:
        site, turn = self.sites[call.site], call.turn
        if not site.is_up:
            return self.at(self.now + self._path(call) / 2, self._unreachable, call)
        admitted = site.admit(turn.prefixes, turn.prompt_tokens, turn.output_tokens, self.now)
        if admitted is None:
            return self.at(self.now + self._path(call) / 2, self._refused, call)
        call.life, call.cached = site.life, admitted.cached_tokens
        self._live[call.site][id(call)] = call
        self.at(admitted.prefilled_at, self._prefilled, call)
        self.at(admitted.ends_at, self._finished, call)

    def _prefilled(self, call: Call) -> None:
        if call.is_dead or call.life != self.sites[call.site].life:
            return
        self.sites[call.site].prefilled()
        self.at(self.now + self._path(call) / 2, self._first_token, (call, call.site))

    def _first_token(self, argument: tuple[Call, int]) -> None:
        call, site = argument
        turn = call.turn
        assert call.ticket is not None
        call.ticket.answering()
        call.router.sessions.learn(
            Conversation(None, turn.prefixes, turn.prompt_tokens), call.router.backends[site].name
        )
        self.ttft.append(self.now - call.began + self.world.access_s[call.session.city] / 2)
        self.prompt += turn.prompt_tokens
        self.cached += call.cached
        self.ideal += matched(turn.prefixes, self._ever)
        self._ever.update(prefix.digest for prefix in turn.prefixes)
        self.cross += 1000 * self._path(call) > REGION_MS and site != self.world.region_of_router[call.router.number]

    def _finished(self, call: Call) -> None:
        if call.is_dead or call.life != self.sites[call.site].life:
            return
        turn = call.turn
        self.sites[call.site].finished(turn.prompt_tokens - call.cached, turn.output_tokens, turn.answer, self.now)
        self._ever.add(turn.answer.digest)
        self._close(call)

    def _close(self, call: Call) -> None:
        self._leave(call)
        self.open_calls -= 1
        self.at(self.now + call.turn.think_s, self._next_turn, call.session)

    def _leave(self, call: Call) -> None:
        self._live[call.site].pop(id(call), None)
        if call.scope is not None:
            call.scope.__exit__(None, None, None)
            call.scope = None

    def _give_up(self, call: Call) -> None:
        """The client was refused. It goes away: its session ends."""
        self.shed += 1
        self.open_calls -= 1
        self.left -= 1

    def _refused(self, call: Call) -> None:
        self._leave(call)
        self._dispatch(call)

    def _unreachable(self, call: Call) -> None:
        call.router.backends[call.site].failed("cannot connect")
        self._leave(call)
        self._dispatch(call)

    def _crash(self, number: int) -> None:
        site = self.sites[number]
        site.crash()
        for call in list(self._live[number].values()):
            assert call.ticket is not None
            if call.ticket.has_answered:  # the stream is continued elsewhere by the relay, which is not simulated
                self.cut += 1
                call.is_dead = True
                self._close(call)
            else:
                successor = Call(
                    call.session,
                    call.turn,
                    call.router,
                    call.began,
                    call.tried,
                    call.site,
                    0,
                    0,
                    call.scope,
                    call.ticket,
                )
                call.is_dead, call.scope = True, None
                self._live[number].pop(id(call))
                self.at(self.now + self._path(call) / 2, self._unreachable, successor)
        self._live[number].clear()

    def _revive(self, number: int) -> None:
        self.sites[number].is_up = True

    def _publish(self, number: int) -> None:
        site = self.sites[number]
        if site.is_up:
            queue = self.published[number]
            fresh = site.sequence % PREFIXES_EVERY == 0
            status = site.status(self.now, fresh)
            if not fresh and queue:
                model, before = status.models[0], queue[-1].status.models[0]
                model = type(model)(
                    *(
                        getattr(model, name) if name not in ("prefixes", "prefixes_complete") else getattr(before, name)
                        for name in model.__struct_fields__
                    )
                )
                status = type(status)(
                    *(getattr(status, name) if name != "models" else (model,) for name in status.__struct_fields__)
                )
            queue.append(Publication(self.now, status))
            del queue[:-KEPT_PUBLICATIONS]
        else:
            self.published[number].clear()
        self.at(self.now + PUBLISH_S, self._publish, number)

    def _path(self, call: Call) -> float:
        return self.world.rtt_s[call.router.number][call.site]


@cache
def _cities() -> tuple[City, ...]:
    return load_cities()


@cache
def _session_cost(trace: Trace) -> tuple[float, float]:
    return uncached_per_session(trace)


def simulate(
    name: str,
    make_policy: Callable[[], Policy],
    trace: Trace,
    requests: int,
    seed: int = 1,
    routers: int = 48,
    faults: bool = True,
) -> Outcome:
    """`requests`: about how many are sent; the horizon follows from the load that the sites can take."""
    cities = _cities()
    tokens, turns = _session_cost(trace)
    capacity = sum(spec.prefill_tokens_per_s for spec in build_world(cities, seed, routers).sites)
    rate = trace.utilisation * capacity / tokens
    horizon = requests / (rate * turns)
    world = build_world(cities, seed, routers, horizon, faults)
    arrivals = sessions(trace, cities, rate, horizon, day_s=horizon, seed=seed)
    began = time.perf_counter()
    simulation = Simulation(make_policy, trace, world, arrivals, seed)
    simulation.run(max_requests=10 * requests)
    wall = time.perf_counter() - began
    times = np.percentile(np.array(simulation.ttft or [0.0]) * 1000, [50, 95, 99])
    sent = max(1, simulation.requests)
    return Outcome(
        name, trace.name, sent, *(round(float(value), 1) for value in times),
        simulation.cached / max(1, simulation.prompt), simulation.ideal / max(1, simulation.prompt),
        simulation.shed / sent, simulation.cross / max(1, len(simulation.ttft)), simulation.retried / sent, simulation.cut,
        simulation.events, round(wall, 2), dict(sorted(simulation.reasons.items())),
    )  # fmt: skip

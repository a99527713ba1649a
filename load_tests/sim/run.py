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

from edge_router.backend import Ticket
from edge_router.policy import MAX_DECLINES, Policy, Preference
from edge_router.session import ConversationFingerprint
from load_tests.sim.cities import City, load_cities
from load_tests.sim.load import LOADS, capacity, shape_of
from load_tests.sim.outcome import Outcome, Tally
from load_tests.sim.router import KEPT_PUBLICATIONS, Publication, SimRouter
from load_tests.sim.site import MODEL, SimSite
from load_tests.sim.traces import Session, Trace, Turn, matched, sessions
from load_tests.sim.world import REGION_MS, World, build_world

PUBLISH_S = 1.0
PREFIXES_EVERY = 10  # publications: digests change slowly
MAX_TRIES = 3
CONNECT_TIMEOUT_S = 2.0
MOVES = 0.02  # of turns whose client has moved to another router: a phone that changes its network, a router that was restarted
WARM_SHARE = 1 / 3  # of a run, before anything is measured: caches fill, sessions reach their usual number


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
    ideal: int = 0
    preference: Preference | None = None
    sent_at: float = 0.0
    waited_s: float = 0.0  # at the site, for what was ahead
    scope: AbstractContextManager[Ticket] | None = None
    ticket: Ticket | None = None
    declined: int = 0
    is_dead: bool = False


class Simulation:
    def __init__(
        self,
        make_policy: Callable[[], Policy],
        world: World,
        arrivals: list[Session],
        seed: int,
        measured: tuple[float, float],
    ) -> None:
        """`measured`: calls that begin within these seconds count; later ones are not begun."""
        self.now = 0.0
        self.world = world
        self.sites = [SimSite(spec) for spec in world.sites]
        self.routers = [SimRouter(i, world, self.sites, make_policy(), self._clock) for i in range(len(world.routers))]
        self.published: list[list[Publication]] = [[] for _ in self.sites]
        self.seed = seed
        self.tally = Tally()
        self.begun = self.answered = self.shed = 0  # of all calls; begun == answered + shed + open at any moment
        self.open_calls = 0  # no first token yet
        self.events = 0
        self._measured = measured
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self._live: list[dict[int, Call]] = [{} for _ in self.sites]  # by id, waiting and decoding
        self._ever: set[bytes] = set()  # the infinite cache
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

    def run(self) -> None:
        """Run to the measured time's end, and until everything begun by then has been answered or shed."""
        heap = self._heap
        while heap and (heap[0][0] < self._measured[1] or self.open_calls):
            self.now, _, what, argument = heapq.heappop(heap)
            self.events += 1
            what(argument)

    def _next_turn(self, session: Session) -> None:
        if self.now >= self._measured[1] or (turn := next(session.turns, None)) is None:
            return
        self.begun += 1
        self.open_calls += 1
        home = self.world.router_of_city[session.city]
        draw = hash((self.seed, session.number, len(turn.prefixes))) % 10_000
        router = (home + 1 + draw % (len(self.routers) - 1)) % len(self.routers) if draw < 10_000 * MOVES else home
        call = Call(session, turn, self.routers[router], self.now)
        self.at(self.now + self.world.access_s[session.city] / 2, self._dispatch, call)

    def _dispatch(self, call: Call) -> None:
        turn = call.turn
        if len(call.tried) - call.declined >= MAX_TRIES:
            return self._give_up(call)
        conversation = ConversationFingerprint.of(None, turn.prefixes, turn.prompt_tokens)
        choice = call.router.decide(conversation, call.tried, self.now, self.published)
        if choice is None:
            return self._give_up(call)
        request, preference = choice
        call.preference, call.sent_at = preference, self.now
        call.site = call.router.index[preference.backend.name]
        call.tried.append(preference.backend.name)
        uncached = turn.prompt_tokens - preference.backend.cached_tokens(request)
        call.scope, call.ticket = call.router.send(call.site, uncached)
        if call.router.reaches(call.site, self.now):
            self.at(self.now + self._path(call) / 2, self._arrive, call)
        else:
            self.at(self.now + CONNECT_TIMEOUT_S, self._unreachable, call)

    def _arrive(self, call: Call) -> None:
        site, turn = self.sites[call.site], call.turn
        if not site.is_up:
            return self.at(self.now + self._path(call) / 2, self._unreachable, call)
        max_queue_ms = call.preference.max_queue_ms if call.preference is not None else None
        queue_ms = 1000 * site.queued_tokens(self.now) / site.rate()
        if max_queue_ms is not None and call.declined < MAX_DECLINES and queue_ms > max_queue_ms:
            return self.at(self.now + self._path(call) / 2, self._declined, call)
        admitted = site.admit(turn.prefixes, turn.prompt_tokens, turn.output_tokens, self.now)
        if admitted is None:
            return self.at(self.now + self._path(call) / 2, self._refused, call)
        call.life, call.cached, call.waited_s = site.life, admitted.cached_tokens, admitted.begins_at - self.now
        call.ideal = min(matched(turn.prefixes, self._ever), turn.prompt_tokens - 1)
        self._ever.update(prefix.digest for prefix in turn.prefixes)
        self._live[call.site][id(call)] = call
        self.at(admitted.prefilled_at, self._prefilled, call)
        self.at(admitted.ends_at, self._finished, call)

    def _prefilled(self, call: Call) -> None:
        if call.is_dead or call.life != self.sites[call.site].life:
            return
        self.sites[call.site].prefilled()
        self.at(self.now + self._path(call) / 2, self._first_token, call)

    def _first_token(self, call: Call) -> None:
        if call.is_dead:  # the site crashed with these bytes on their way; the call has been sent elsewhere
            return
        turn = call.turn
        assert call.ticket is not None
        assert call.preference is not None
        call.ticket.answering()
        router = call.router
        router.sessions.learn(
            ConversationFingerprint.of(None, turn.prefixes, turn.prompt_tokens), router.backends[call.site].name
        )
        self.answered += 1
        self.open_calls -= 1
        if call.began >= self._measured[0]:
            is_cross = 1000 * self._path(call) > REGION_MS and call.site != self.world.region_of_router[router.number]
            self.tally.answered(
                call.preference,
                ttft_ms=1000 * (self.now - call.began + self.world.access_s[call.session.city] / 2),
                from_router_ms=1000 * (self.now - call.sent_at),
                queue_ms=1000 * call.waited_s,
                prompt=turn.prompt_tokens,
                cached=call.cached,
                ideal=call.ideal,
                tries=len(call.tried) - call.declined,
                declined=call.declined,
                is_cross=is_cross,
                rate=self.sites[call.site].rate(),
            )

    def _finished(self, call: Call) -> None:
        if call.is_dead or call.life != self.sites[call.site].life:
            return
        turn = call.turn
        self.sites[call.site].finished(turn.prompt_tokens - call.cached, turn.output_tokens, turn.answer, self.now)
        self._ever.add(turn.answer.digest)
        self._close(call)

    def _close(self, call: Call) -> None:
        self._leave(call)
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
        if call.began >= self._measured[0]:
            self.tally.shed += 1

    def _declined(self, call: Call) -> None:
        """The queue is longer than the router was ready to wait for, and the site says how long it is."""
        assert call.ticket is not None
        queued = self.sites[call.site].queued_tokens(self.now)
        call.router.backends[call.site].declined(MODEL, queued, self.now - self._path(call))
        call.ticket.answering()
        call.declined += 1
        self._leave(call)
        self._dispatch(call)

    def _refused(self, call: Call) -> None:
        self._leave(call)
        self._dispatch(call)

    def _unreachable(self, call: Call) -> None:
        call.router.backends[call.site].failed("cannot connect")
        self._leave(call)
        self._dispatch(call)

    def _crash(self, number: int) -> None:
        """What has begun to answer is continued elsewhere by the relay, which is not simulated; the rest is sent elsewhere."""
        self.sites[number].crash()
        for call in list(self._live[number].values()):
            assert call.ticket is not None
            call.is_dead = True
            if call.ticket.has_answered:
                self.tally.cut += 1
                self._close(call)
            else:
                successor = Call(
                    call.session, call.turn, call.router, call.began, call.tried, call.site, declined=call.declined
                )
                successor.scope, successor.ticket, call.scope = call.scope, call.ticket, None
                self.at(self.now + self._path(call) / 2, self._unreachable, successor)
        self._live[number].clear()

    def _revive(self, number: int) -> None:
        self.sites[number].is_up = True

    def _publish(self, number: int) -> None:
        site = self.sites[number]
        if site.is_up:
            queue = self.published[number]
            queue.append(Publication(self.now, site.status(self.now, site.sequence % PREFIXES_EVERY == 0)))
            del queue[:-KEPT_PUBLICATIONS]
        else:
            self.published[number].clear()
        self.at(self.now + PUBLISH_S, self._publish, number)

    def _path(self, call: Call) -> float:
        return self.world.rtt_s[call.router.number][call.site]


@cache
def _cities() -> tuple[City, ...]:
    return load_cities()


def prepare(
    make_policy: Callable[[], Policy], trace: Trace, load: str, requests: int, seed: int, faults: bool = True
) -> Simulation:
    """`requests`: about how many are sent in all; how long that takes follows from the load. The measured time is one day of the clients' world."""
    cities = _cities()
    shape = shape_of(trace)
    rate = LOADS[load] * capacity(build_world(cities, seed).sites, shape)
    end = requests / rate
    measured = (WARM_SHARE * end, end)
    day = measured[1] - measured[0]
    world = build_world(cities, seed, (measured[0] + 0.1 * day, measured[1] - 0.2 * day) if faults else None)
    arrivals = sessions(trace, cities, rate / shape.turns, end, day, seed)
    return Simulation(make_policy, world, arrivals, seed, measured)


def simulate(
    name: str,
    make_policy: Callable[[], Policy],
    trace: Trace,
    load: str,
    requests: int,
    seed: int,
    faults: bool = True,
) -> Outcome:
    simulation = prepare(make_policy, trace, load, requests, seed, faults)
    began = time.perf_counter()
    simulation.run()
    wall_s = time.perf_counter() - began
    return simulation.tally.outcome(name, trace.name, load, seed, simulation.begun, simulation.events, wall_s)

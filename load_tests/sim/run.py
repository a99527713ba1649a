"""One run: a policy, a trace and a world, from a seed to figures. The event loop of the simulation.

Sessions arrive in an open loop; within a session, a turn follows the previous answer (a closed loop). Equal seeds give equal runs: events at the same
time keep their order of creation, and the machine's clock is read only for the speed of the run.
"""

import heapq
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from load_tests.sim.cities import City, load_cities
from load_tests.sim.load import LOADS, QUIET, capacity, shape_of
from load_tests.sim.mooncake import TraceFile
from load_tests.sim.outcome import Outcome, Tally
from load_tests.sim.router import KEPT_S, Publication, SimRouter
from load_tests.sim.site import MODEL, Job, SimSite
from load_tests.sim.traces import Session, Trace, Turn, matched, sessions
from load_tests.sim.trouble import NONE, Trouble, hit_site
from load_tests.sim.world import REGION_MS, World, build_world
from pilotlight.edge_router.backends.backend import Ticket
from pilotlight.edge_router.requests.session import ConversationFingerprint, Prefix
from pilotlight.edge_router.routing.views import MAX_DECLINES, Policy, Preference

PREFIXES_EVERY_S = 10.0  # seconds between updates of a site's prefix digest
MAX_TRIES = 3
CONNECT_TIMEOUT_S = 2.0
WARM_SHARE = 1 / 3  # unmeasured first share of a run, until caches are full and the number of sessions is steady


@dataclass(slots=True)
class Call:
    """One turn of a session, from its request to its end."""

    session: Session
    turn: Turn
    router: SimRouter
    conversation: ConversationFingerprint  # the router's view, with estimated token counts
    began: float
    tried: list[str] = field(default_factory=list)  # sites that were tried and have not declined
    site: int = -1
    life: int = 0
    job: Job | None = None
    ideal: int = 0
    ttft_s: float = 0.0
    preference: Preference | None = None
    sent_at: float = 0.0
    arrived_at: float = 0.0
    scope: AbstractContextManager[Ticket] | None = None
    ticket: Ticket | None = None
    declined: list[str] = field(default_factory=list)  # sites that declined
    is_dead: bool = False


class Simulation:
    def __init__(
        self,
        make_policy: Callable[[], Policy],
        world: World,
        arrivals: list[Session],
        seed: int,
        measured: tuple[float, float],
        slo_ttft_s: float = 2.0,
        trouble: Trouble = NONE,
    ) -> None:
        """Prepare a run. `measured`: calls that start within these seconds count; later ones are not started."""
        self.now = 0.0
        self.world = world
        self.trouble = trouble
        self._hit = hit_site(world)
        self.sites = [
            SimSite(
                replace(spec, kv_tokens=int(spec.kv_tokens * trouble.cache_share)),
                trouble.fault if i == self._hit else "",
            )
            for i, spec in enumerate(world.sites)
        ]
        factors = trouble.rtt_factors(world, seed)
        self.routers = [
            SimRouter(i, world, self.sites, make_policy(), self._clock, trouble, factors[i])
            for i in range(len(world.routers))
        ]
        self.published: list[list[Publication]] = [[] for _ in self.sites]
        self.seed = seed
        self.tally = Tally(slo_ttft_s)
        self.started = self.answered = self.shed = 0  # always: started == answered + shed + open_calls
        self.open_calls = 0  # not yet answered completely
        self.events = 0
        self._measured = measured
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self.live: list[dict[int, Call]] = [{} for _ in self.sites]  # per site, waiting and decoding calls by id
        self._due: list[float] = [float("inf")] * len(self.sites)  # when each site's next event was last expected
        self._ever: set[bytes] = set()  # digests in the infinite cache
        for session in arrivals:
            self.at(session.starts_at, self._next_turn, session)
        for i in range(len(self.sites)):
            self.at(trouble.publish_s * i / len(self.sites), self._publish, i)
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
        """Run to the end of the measured time, and until every started call has been answered or shed."""
        heap = self._heap
        while heap and (heap[0][0] < self._measured[1] or self.open_calls):
            self.now, _, what, argument = heapq.heappop(heap)
            self.events += 1
            what(argument)

    def _next_turn(self, session: Session) -> None:
        if self.now >= self._measured[1] or (turn := next(session.turns, None)) is None:
            return
        self.started += 1
        self.open_calls += 1
        home = self.world.router_of_city[session.city]
        draw = hash((self.seed, session.number, len(turn.prefixes))) % 10_000
        moves = draw < 10_000 * self.trouble.moves
        router = (home + 1 + draw % (len(self.routers) - 1)) % len(self.routers) if moves else home
        call = Call(session, turn, self.routers[router], _as_guessed(turn, session.guess), self.now)
        self.at(self.now + self.world.access_s[session.city] / 2, self._dispatch, call)

    def _dispatch(self, call: Call) -> None:
        turn = call.turn
        if len(call.tried) >= MAX_TRIES:
            return self._give_up(call)
        request, preferences = call.router.decide(call.conversation, turn, self.now, self.published)
        # The last choice must accept, so it may be a site that declined and whose queue is known now.
        excluded = call.tried if len(call.declined) == MAX_DECLINES else [*call.tried, *call.declined]
        preference = next((each for each in preferences if each.backend.name not in excluded), None)
        if preference is None:
            return self._give_up(call)
        wanted = None if call.tried or call.declined else call.router.hint(preferences, self.now)
        if wanted is not None:
            self.at(self.now + self.world.rtt_s[call.router.number][wanted] / 2, self._hinted, wanted)
        call.preference, call.sent_at = preference, self.now
        call.site = call.router.index[preference.backend.name]
        call.tried.append(preference.backend.name)
        uncached = request.prompt_tokens - preference.backend.cached_tokens(request)
        call.scope, call.ticket = call.router.send(call.site, uncached, preference.expected_ms)
        if call.router.reaches(call.site, self.now):
            self.at(self.now + self._path(call) / 2, self._arrive, call)
        else:
            self.at(self.now + CONNECT_TIMEOUT_S, self._unreachable, call)

    def _arrive(self, call: Call) -> None:
        site, turn = self.sites[call.site], call.turn
        if not site.is_up:
            return self.at(self.now + self._path(call) / 2, self._unreachable, call)
        self._advance(call.site)
        max_queue_ms = call.preference.max_queue_ms if call.preference is not None else None
        queue_ms = 1000 * site.told_queue_tokens() / site.rate()
        if max_queue_ms is not None and len(call.declined) < MAX_DECLINES and queue_ms > max_queue_ms:
            return self.at(self.now + self._path(call) / 2, self._declined, call)
        job = site.admit(call, turn.prefixes, turn.prompt_tokens, turn.output_tokens, turn.answer, self.now)
        if job is None:
            return self.at(self.now + self._path(call) / 2, self._refused, call)
        call.life, call.job, call.arrived_at = site.life, job, self.now
        call.ideal = min(matched(turn.prefixes, self._ever), turn.prompt_tokens - 1)
        self._ever.update(prefix.digest for prefix in turn.prefixes)
        self.live[call.site][id(call)] = call
        self._await(call.site)

    def _hinted(self, number: int) -> None:
        if self.sites[number].is_up:
            self.sites[number].wake(self.now)

    def _await(self, number: int) -> None:
        """Schedule a look at the site when its next event is due."""
        due = self.sites[number].next_event_at()
        if due != self._due[number]:
            self._due[number] = due
            if due < float("inf"):
                self.at(due, self._site_event, (number, due))

    def _site_event(self, whose: tuple[int, float]) -> None:
        number, due = whose
        if due == self._due[number]:  # otherwise an earlier event has rescheduled the look
            self._advance(number)
            self._await(number)

    def _advance(self, number: int) -> None:
        prefilled, ended = self.sites[number].advance(self.now)
        for job in prefilled:
            self.at(self.now + self._path(job.call) / 2, self._first_token, job.call)
        for job in ended:
            self._finished(job.call)

    def _first_token(self, call: Call) -> None:
        if call.is_dead:  # the site crashed while these bytes were on their way; the call has been sent elsewhere
            return
        turn = call.turn
        assert call.ticket is not None
        assert call.preference is not None
        assert call.job is not None
        call.ticket.answering()
        router, backend = call.router, call.router.backends[call.site]
        backend.first_token(call.preference.expected_ms, 1000 * (self.now - call.sent_at))
        router.sessions.learn(call.conversation, backend.name)
        self.answered += 1
        call.ttft_s = self.now - call.began + self.world.access_s[call.session.city] / 2
        if call.began >= self._measured[0]:
            is_cross = 1000 * self._path(call) > REGION_MS and call.site != self.world.region_of_router[router.number]
            self.tally.answered(
                call.preference,
                ttft_ms=1000 * call.ttft_s,
                from_router_ms=1000 * (self.now - call.sent_at),
                queue_ms=1000 * (call.job.begins_at - call.arrived_at),
                prompt=turn.prompt_tokens,
                cached=call.job.cached_tokens,
                ideal=call.ideal,
                tries=len(call.tried),
                declined=len(call.declined),
                is_cross=is_cross,
                rate=self.sites[call.site].rate(),
            )

    def _finished(self, call: Call) -> None:
        self._ever.add(call.turn.answer.digest)
        self.live[call.site].pop(id(call), None)
        self.at(self.now + self._path(call) / 2, self._last_token, call)

    def _last_token(self, call: Call) -> None:
        assert call.job is not None
        if call.began >= self._measured[0]:
            decode_s = self.now - self._path(call) / 2 - call.job.first_token_at
            self.tally.ended(call.ttft_s, decode_s, call.turn.output_tokens)
        self._close(call)

    def _close(self, call: Call) -> None:
        self.open_calls -= 1
        self._leave(call)
        self.at(self.now + call.turn.think_s, self._next_turn, call.session)

    def _leave(self, call: Call) -> None:
        self.live[call.site].pop(id(call), None)
        if call.scope is not None:
            call.scope.__exit__(None, None, None)
            call.scope = None

    def _give_up(self, call: Call) -> None:
        """End the session of a client whose request was refused."""
        self.shed += 1
        self.open_calls -= 1
        if call.began >= self._measured[0]:
            self.tally.shed += 1

    def _declined(self, call: Call) -> None:
        """Handle a site that declines because its queue is too long, and reports the queue's length."""
        assert call.ticket is not None
        queued = self.sites[call.site].told_queue_tokens()
        call.router.backends[call.site].declined(MODEL, queued, self.now - self._path(call))
        call.ticket.refused()
        call.declined.append(call.tried.pop())
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
        """Crash a site and send its unanswered calls elsewhere.

        Started answers count as cut: their continuation at another site is not simulated.
        """
        self.sites[number].crash()
        self._due[number] = float("inf")
        for call in list(self.live[number].values()):
            assert call.ticket is not None
            call.is_dead = True
            if call.ticket.has_answered:
                self.tally.cut += 1
                self._close(call)
            else:
                successor = Call(
                    call.session, call.turn, call.router, call.conversation, call.began, call.tried, call.site, declined=call.declined,
                )  # fmt: skip
                successor.scope, successor.ticket, call.scope = call.scope, call.ticket, None
                self.at(self.now + self._path(call) / 2, self._unreachable, successor)
        self.live[number].clear()

    def _revive(self, number: int) -> None:
        self.sites[number].is_up = True

    def _publish(self, number: int) -> None:
        site = self.sites[number]
        if site.is_up:
            queue = self.published[number]
            self._advance(number)
            self._await(number)
            every = max(1, round(PREFIXES_EVERY_S / self.trouble.publish_s))
            claimed: tuple[bytes, ...] = ()
            if site.fault == "claims prefixes":
                claimed = tuple(each.held_digests() for each in self.sites if each is not site)
            queue.append(Publication.of(self.now, site.status(self.now, site.sequence % every == 0, claimed)))
            del queue[: -(2 + round(KEPT_S / self.trouble.publish_s))]
        else:
            self.published[number].clear()
        self.at(self.now + self.trouble.publish_s, self._publish, number)

    def _path(self, call: Call) -> float:
        return self.world.rtt_s[call.router.number][call.site]


@cache
def _cities() -> tuple[City, ...]:
    return load_cities()


def prepare(
    make_policy: Callable[[], Policy],
    trace: Trace | TraceFile,
    load: str,
    requests: int,
    seed: int,
    faults: bool = True,
    trouble: Trouble = NONE,
) -> Simulation:
    """Prepare a run. `requests`: about how many are sent in all; the duration follows from the load.

    The measured time is one day of the clients' world.
    """
    cities = _cities()
    shape = trace.shape() if isinstance(trace, TraceFile) else shape_of(trace)
    rate = (QUIET if load == "quiet" else LOADS[load]) * capacity(build_world(cities, seed).sites, shape)
    end = requests / rate
    measured = (WARM_SHARE * end, end)
    day = measured[1] - measured[0]
    span = (measured[0] + 0.1 * day, measured[1] - 0.2 * day) if faults else None
    world = build_world(cities, seed, span)
    world = replace(world, outages=(*world.outages, *trouble.outages(world, measured)))
    if isinstance(trace, TraceFile):
        arrivals = trace.sessions(cities, rate, requests, seed)
    else:
        arrivals = sessions(trace, cities, rate / shape.turns, end, day, seed)
    return Simulation(make_policy, world, arrivals, seed, measured, trace.slo_ttft_s, trouble)


def simulate(
    name: str,
    make_policy: Callable[[], Policy],
    trace: Trace | TraceFile,
    load: str,
    requests: int,
    seed: int,
    faults: bool = True,
    trouble: Trouble = NONE,
) -> Outcome:
    simulation = prepare(make_policy, trace, load, requests, seed, faults, trouble)
    began = time.process_time()
    simulation.run()
    cpu_s = time.process_time() - began
    turned = sum(site.evicted_tokens for site in simulation.sites) / sum(
        site.spec.kv_tokens for site in simulation.sites
    )
    wakes = sum(site.wakes for site in simulation.sites)
    return simulation.tally.outcome(
        name, trace.name, load, simulation.seed, simulation.started, simulation.events, cpu_s, turned, wakes
    )


def _as_guessed(turn: Turn, guess: float) -> ConversationFingerprint:
    prefixes = tuple([Prefix(digest, int(guess * tokens), telling) for digest, tokens, telling in turn.prefixes])
    return ConversationFingerprint.of(None, prefixes, max(1, int(guess * turn.prompt_tokens)))

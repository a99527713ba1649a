"""A modelled site, which may also publish misleading figures.

It has permits, one prefill queue, decodes that slow each other down, a cache that evicts, and a model that sleeps. Prompts are prefilled one after
the other, in chunks that share a step with all running decodes, so prefill and decodes slow each other down. Time is an argument. Between two events
all rates are constant, so the state is advanced in closed form instead of step by step. A decode's end is stored as a count of its site's steps
(processor sharing's virtual time), which does not change when neighbours join or leave. Not simulated: slower tiers.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Literal

from pilotlight.edge_router.requests.session import Prefix
from pilotlight.wire.hop.prefixes import MAX_PUBLISHED, encode_prefixes, short_digest
from pilotlight.wire.hop.status import ModelStatus, Place, ProcessStatus, SiteStatus

MODEL = "m"
BLOCK = 16  # tokens; the KV cache is counted in these
CHUNK = 256  # prompt tokens in one step, in which every running decode also gets a token
STEP_S = 0.02  # duration of a step of a single decode
STEP_GROWTH = 0.015  # each further decode lengthens a step by this share of STEP_S
SLEEP_AFTER_S = 300.0
INFLOW_WINDOW_S = 10.0  # period over which a site averages arrivals
GRAY = 8.0  # a gray site is this many times slower than it publishes

# What a faulty site does: it publishes no load and never declines; it claims all prefixes of other sites; it is slower than it publishes.
Fault = Literal["", "says idle", "claims prefixes", "gray"]


@dataclass(frozen=True, slots=True)
class SiteSpec:
    name: str
    place: Place
    prefill_tokens_per_s: float
    kv_tokens: int
    max_inflight: int
    wake_ms: float
    rate_error: float = 1.0  # factor of the published rates: a site's own measurement is inexact


@dataclass(slots=True, eq=False)
class Job:
    """One request at a site."""

    call: Any  # the caller's object; the site does not use it
    cached_tokens: int
    uncached_tokens: int
    output_tokens: int
    answer: Prefix
    left_tokens: float  # still to be prefilled
    begins_at: float = 0.0  # when its prefill starts; until then it waits
    first_token_at: float = 0.0


class SimSite:
    def __init__(self, spec: SiteSpec, fault: Fault = "") -> None:
        self.spec = spec
        self.fault = fault
        self.is_up = True
        self.life = 0  # number of crashes; calls from before a crash are lost
        self.sequence = 0
        self.evicted_tokens = 0
        self.wakes = 0
        self._rate = spec.prefill_tokens_per_s / (GRAY if fault == "gray" else 1.0)
        self._step_s = STEP_S * (GRAY if fault == "gray" else 1.0)
        self._at = 0.0  # the attributes below are valid for this time
        self._queue: deque[Job] = deque()  # the first one is being prefilled
        self._queued_tokens = 0.0
        self._decodes: list[tuple[float, int, Job]] = []  # a heap by the step in which each ends
        self._steps = 0.0  # number of decode steps so far
        self._jobs = 0
        self._held_tokens = self._held_outputs = 0  # tokens of open sequences
        self._arrived_requests = self._arrived_tokens = 0  # arrivals since the last status
        self._requests_per_s = self._tokens_per_s = 0.0
        self._inflow_at = 0.0
        self._digest = b""
        self._digests = 0  # the digest's version
        self._awake_at = -1.0
        self._last_use = -1e9  # every site starts asleep
        self._cache: OrderedDict[bytes, int] = (
            OrderedDict()
        )  # tokens of each prefix's last segment; least recently used first
        self._cached = 0

    @property
    def running(self) -> int:
        return len(self._decodes)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        return not (self._queue or self._decodes)

    def chunk_s(self) -> float:
        """Return the duration of a step with a chunk of a prompt."""
        return CHUNK / self._rate + self._step_s * STEP_GROWTH * len(self._decodes)

    def step_s(self) -> float:
        """Return the duration of a step of decodes alone."""
        return self._step_s * (1 + STEP_GROWTH * len(self._decodes))

    def rate(self) -> float:
        return CHUNK / self.chunk_s()

    def admit(
        self, call: Any, prefixes: tuple[Prefix, ...], prompt: int, output: int, answer: Prefix, now: float
    ) -> Job | None:
        """Admit a request; None if the site is full.

        The caller has advanced the site to `now`, and must schedule its next event afterwards.
        """
        cached = min(self._match(prefixes), prompt - 1)
        need = prompt - cached + output  # blocks of a cached prefix are shared
        if self.running + self.waiting >= self.spec.max_inflight or self._held_tokens + need > self.spec.kv_tokens:
            return None
        self.wake(now)
        self._held_tokens += need
        self._held_outputs += output
        self._keep(prefixes)
        self._arrived_requests += 1
        self._arrived_tokens += prompt - cached
        job = Job(call, cached, prompt - cached, output, answer, float(prompt - cached), max(now, self._awake_at))
        self._queue.append(job)
        self._queued_tokens += job.left_tokens
        return job

    def wake(self, now: float) -> None:
        """Wake the model, for a request or a router's hint."""
        if self._is_asleep(now):
            self._awake_at = now + self.spec.wake_ms / 1000
            self.wakes += 1
        self._last_use = now

    def queued_tokens(self) -> int:
        """Return the prompt tokens that are accepted and not yet computed."""
        return int(self._queued_tokens)

    def next_event_at(self) -> float:
        """Return when the next prefill or decode ends, unless a request arrives; infinity if idle."""
        at = math.inf
        if self._queue:
            begins = max(self._at, self._awake_at)
            at = begins + self._queue[0].left_tokens / self.rate()
        if self._decodes:
            step_s = self.chunk_s() if self._queue and self._awake_at <= self._at else self.step_s()
            at = min(at, self._at + (self._decodes[0][0] - self._steps) * step_s)
        return at

    def advance(self, now: float) -> tuple[list[Job], list[Job]]:
        """Return the jobs with a new first token, and those that have ended."""
        prefilled: list[Job] = []
        ended: list[Job] = []
        while (at := self.next_event_at()) <= now:
            self._progress(at)
            if self._decodes and self._decodes[0][0] <= self._steps + 1e-6:
                _, _, job = heappop(self._decodes)
                self._end(job)
                ended.append(job)
            elif self._queue and self._queue[0].left_tokens <= 1e-3:
                prefilled.append(self._begin_decode(self._queue.popleft()))
        self._progress(now)
        return prefilled, ended

    def crash(self) -> None:
        self.is_up = False
        self.life += 1
        self._held_tokens = self._held_outputs = self._cached = 0
        self._queue.clear()
        self._decodes.clear()
        self._queued_tokens = 0.0
        self._awake_at = 0.0
        self._last_use = -1e9
        self._requests_per_s = self._tokens_per_s = 0.0
        self._digest = b""
        self._cache.clear()

    def status(self, now: float, with_prefixes: bool, claimed: tuple[bytes, ...] = ()) -> SiteStatus:
        """Return the site's status.

        `with_prefixes`: compute a new digest of the cache; otherwise the last one is repeated, as at a real site. `claimed`: digests of other sites
        that a misleading site publishes as its own.
        """
        self.sequence += 1
        self._average_inflow(now)
        if with_prefixes or not self._digest:
            self._digest = self._published(claimed)
            self._digests += 1
        asleep, waking = self._is_asleep(now), now < self._awake_at
        total = self.spec.kv_tokens // BLOCK
        says_idle = self.fault == "says idle"
        error = (
            self.spec.rate_error * self.spec.prefill_tokens_per_s / self._rate
        )  # a gray site publishes its nominal speed
        inflight = 0 if says_idle else self.running + self.waiting
        model = ModelStatus(
            MODEL,
            "host" if asleep else "loading" if waking else "device",
            loaded=1 - 1000 * (self._awake_at - now) / self.spec.wake_ms if waking else 0.0 if asleep else 1.0,
            running=0 if says_idle else self.running,
            waiting=0 if says_idle else self.waiting,
            queued_tokens=self.told_queue_tokens(),
            kv_blocks_free=total if says_idle else total - self._held_tokens // BLOCK,
            kv_blocks_total=total,
            prefill_tokens_per_s=self.rate() * error,
            decode_tokens_per_s=error / self.step_s(),
            wake_ms=self.spec.wake_ms,
            prefixes=self._digest,
            prefixes_complete=len(self._cache) <= MAX_PUBLISHED,
            arriving_per_s=0.0 if says_idle else self._requests_per_s,
            arriving_tokens_per_s=0.0 if says_idle else self._tokens_per_s,
        )
        return SiteStatus(
            self.spec.name,
            "sim",
            self.spec.place,
            self.sequence,
            self.is_up,
            False,
            inflight,
            self.spec.max_inflight,
            (model,),
            (ProcessStatus("site", self.life),),
            digests=self._digests,
        )

    def told_queue_tokens(self) -> int:
        return 0 if self.fault == "says idle" else self.queued_tokens()

    def matched_tokens(self, prefixes: tuple[Prefix, ...], prompt: int) -> int:
        return min(self._match(prefixes), prompt - 1)

    def wake_left_s(self, now: float) -> float:
        return self.spec.wake_ms / 1000 if self._is_asleep(now) else max(0.0, self._awake_at - now)

    def _is_asleep(self, now: float) -> bool:
        return self.is_idle and now - self._last_use > SLEEP_AFTER_S

    def _progress(self, now: float) -> None:
        """Advance to `now` at the current rates; there must be no event before `now`."""
        begins = max(self._at, self._awake_at) if self._queue else now
        alone_s = min(begins, now) - self._at
        if alone_s > 0 and self._decodes:
            self._steps += alone_s / self.step_s()
        if now > begins:
            computed = min(self._queue[0].left_tokens, (now - begins) * self.rate())
            self._queue[0].left_tokens -= computed
            self._queued_tokens -= computed
            self._steps += (now - begins) / self.chunk_s()
        self._at = max(self._at, now)

    def _begin_decode(self, job: Job) -> Job:
        self._queued_tokens = max(0.0, self._queued_tokens - job.left_tokens) if self._queue else 0.0
        job.first_token_at = self._at
        self._jobs += 1
        heappush(self._decodes, (self._steps + job.output_tokens - 1, self._jobs, job))
        if self._queue:
            self._queue[0].begins_at = self._at
        return job

    def _end(self, job: Job) -> None:
        self._held_tokens -= job.uncached_tokens + job.output_tokens
        self._held_outputs -= job.output_tokens
        self._last_use = self._at
        self._insert(job.answer.digest, job.output_tokens)
        self._evict()

    def _average_inflow(self, now: float) -> None:
        seconds = now - self._inflow_at
        if seconds <= 0:
            return
        kept = math.exp(-seconds / INFLOW_WINDOW_S)
        self._requests_per_s = kept * self._requests_per_s + (1 - kept) * self._arrived_requests / seconds
        self._tokens_per_s = kept * self._tokens_per_s + (1 - kept) * self._arrived_tokens / seconds
        self._arrived_requests = self._arrived_tokens = 0
        self._inflow_at = now

    def held_digests(self) -> bytes:
        return self._digest

    def _published(self, claimed: tuple[bytes, ...]) -> bytes:
        newest = []
        for digest in reversed(self._cache):
            newest.append(short_digest(digest))
            if len(newest) == MAX_PUBLISHED:
                break
        if claimed:
            words = {int.from_bytes(raw[i : i + 4], "big") for raw in claimed for i in range(0, len(raw), 4)}
            newest = [*words, *newest][:MAX_PUBLISHED]
        return encode_prefixes(newest)

    def _match(self, prefixes: tuple[Prefix, ...]) -> int:
        cached = 0
        for prefix in prefixes:
            if prefix.digest not in self._cache:
                break
            cached = prefix.tokens
        return cached

    def _keep(self, prefixes: tuple[Prefix, ...]) -> None:
        """Insert a prompt's segments, the last one first, so that it is evicted before its prefix."""
        for i in range(len(prefixes) - 1, -1, -1):
            self._insert(prefixes[i].digest, prefixes[i].tokens - (prefixes[i - 1].tokens if i else 0))
        self._evict()

    def _insert(self, digest: bytes, tokens: int) -> None:
        if digest in self._cache:
            self._cache.move_to_end(digest)
        else:
            self._cache[digest] = tokens
            self._cached += tokens

    def _evict(self) -> None:
        """Evict prefixes that exceed the cache, which includes tokens that open sequences are writing."""
        while self._cached + self._held_outputs > self.spec.kv_tokens and self._cache:
            _, tokens = self._cache.popitem(last=False)
            self._cached -= tokens
            self.evicted_tokens += tokens

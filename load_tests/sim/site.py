"""A modelled site: permits, one prefill queue, decodes that crowd each other, a prefix cache that evicts, a model that sleeps.

Time enters as an argument. What it leaves out: batching inside a step (prefills are served one after the other), tiers behind the device, and
token-wise progress (a decode's speed is fixed by who is there when it begins).
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from edge_router.session import Prefix
from wire.prefixes import MAX_PUBLISHED, encode_prefixes, short_digest
from wire.status import ModelStatus, Place, ProcessStatus, SiteStatus

MODEL = "m"
BLOCK = 16  # tokens; the KV cache is counted in these
DECODE_SHARE = 0.5  # of the prefill rate that a full house of decodes takes
STEP_S = 0.02  # of a decode that is alone
STEP_GROWTH = 0.015  # by which each neighbour lengthens it
SLEEP_AFTER_S = 300.0
INFLOW_WINDOW_S = 10.0  # over which a site averages what arrives


@dataclass(frozen=True, slots=True)
class SiteSpec:
    name: str
    place: Place
    prefill_tokens_per_s: float
    kv_tokens: int
    max_inflight: int
    wake_ms: float


class Admitted(NamedTuple):
    cached_tokens: int
    begins_at: float
    prefilled_at: float
    ends_at: float


class SimSite:
    def __init__(self, spec: SiteSpec) -> None:
        self.spec = spec
        self.is_up = True
        self.life = 0  # grows with every crash: what was begun in an older life is lost
        self.running = 0
        self.waiting = 0
        self.held_tokens = 0  # of sequences at work
        self.sequence = 0
        self._arrived_requests = self._arrived_tokens = 0  # since the last status
        self._requests_per_s = self._tokens_per_s = 0.0
        self._inflow_at = 0.0
        self._digest = b""
        self._busy_until = 0.0
        self._awake_at = -1.0
        self._last_use = -1e9  # every site starts asleep
        self._cache: OrderedDict[bytes, int] = OrderedDict()  # least recently used first; tokens of the last segment
        self._cached = 0

    def rate(self) -> float:
        return self.spec.prefill_tokens_per_s * (1 - DECODE_SHARE * min(1.0, self.running / self.spec.max_inflight))

    def admit(self, prefixes: tuple[Prefix, ...], prompt: int, output: int, now: float) -> Admitted | None:
        """None: refused, full."""
        cached = min(self._match(prefixes), prompt - 1)
        need = prompt - cached + output  # sequences share the blocks of a common prefix
        if self.running + self.waiting >= self.spec.max_inflight or self.held_tokens + need > self.spec.kv_tokens:
            return None
        if self.running + self.waiting == 0 and now - self._last_use > SLEEP_AFTER_S:
            self._awake_at = now + self.spec.wake_ms / 1000
        self._last_use = now
        self._keep(prefixes)
        self.waiting += 1
        self.held_tokens += need
        self._arrived_requests += 1
        self._arrived_tokens += prompt - cached
        begins = max(now, self._busy_until, self._awake_at)
        prefilled = self._busy_until = begins + (prompt - cached) / self.rate()
        step = STEP_S * (1 + STEP_GROWTH * self.running)
        return Admitted(cached, begins, prefilled + step, prefilled + output * step)

    def queued_tokens(self, now: float) -> int:
        """Accepted and not yet computed."""
        return int(max(0.0, self._busy_until - max(now, self._awake_at)) * self.rate())

    def prefilled(self) -> None:
        self.waiting -= 1
        self.running += 1

    def finished(self, uncached: int, output: int, answer: Prefix, now: float) -> None:
        self.running -= 1
        self.held_tokens -= uncached + output
        self._last_use = now
        self._insert(answer.digest, output)
        self._evict()

    def crash(self) -> None:
        self.is_up = False
        self.life += 1
        self.running = self.waiting = self.held_tokens = self._cached = 0
        self._busy_until = self._awake_at = 0.0
        self._last_use = -1e9
        self._requests_per_s = self._tokens_per_s = 0.0
        self._digest = b""
        self._cache.clear()

    def status(self, now: float, with_prefixes: bool) -> SiteStatus:
        """`with_prefixes`: the digest of the cache is made anew; else the last one is repeated, as it is at a site."""
        self.sequence += 1
        self._average_inflow(now)
        if with_prefixes or not self._digest:
            self._digest = self._published()
        asleep = self.running + self.waiting == 0 and now - self._last_use > SLEEP_AFTER_S
        waking = now < self._awake_at
        total = self.spec.kv_tokens // BLOCK
        model = ModelStatus(
            MODEL,
            "host" if asleep else "loading" if waking else "device",
            running=self.running,
            waiting=self.waiting,
            queued_tokens=self.queued_tokens(now),
            kv_blocks_free=total - self.held_tokens // BLOCK,
            kv_blocks_total=total,
            prefill_tokens_per_s=self.rate(),
            decode_tokens_per_s=1 / (STEP_S * (1 + STEP_GROWTH * self.running)),
            wake_ms=self.spec.wake_ms if asleep else max(0.0, 1000 * (self._awake_at - now)),
            prefixes=self._digest,
            prefixes_complete=len(self._cache) <= MAX_PUBLISHED,
            arriving_per_s=self._requests_per_s,
            arriving_tokens_per_s=self._tokens_per_s,
        )
        inflight = self.running + self.waiting
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
        )

    def _average_inflow(self, now: float) -> None:
        seconds = now - self._inflow_at
        if seconds <= 0:
            return
        kept = math.exp(-seconds / INFLOW_WINDOW_S)
        self._requests_per_s = kept * self._requests_per_s + (1 - kept) * self._arrived_requests / seconds
        self._tokens_per_s = kept * self._tokens_per_s + (1 - kept) * self._arrived_tokens / seconds
        self._arrived_requests = self._arrived_tokens = 0
        self._inflow_at = now

    def _published(self) -> bytes:
        newest = []
        for digest in reversed(self._cache):
            newest.append(short_digest(digest))
            if len(newest) == MAX_PUBLISHED:
                break
        return encode_prefixes(newest)

    def _match(self, prefixes: tuple[Prefix, ...]) -> int:
        cached = 0
        for prefix in prefixes:
            if prefix.digest not in self._cache:
                break
            cached = prefix.tokens
        return cached

    def _keep(self, prefixes: tuple[Prefix, ...]) -> None:
        """The tail first, so that it is evicted before what it hangs on."""
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
        while self._cached > self.spec.kv_tokens and self._cache:
            _, tokens = self._cache.popitem(last=False)
            self._cached -= tokens

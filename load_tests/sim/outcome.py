"""The results of a run: latencies, goodput, cache hits, shed requests, errors of prediction.

Times are TTFT, TPOT and end-to-end latency; cache hits are compared with those of an infinite cache. This module only counts; run.py decides which
calls count.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from pilotlight.edge_router.routing.views import Preference


@dataclass(slots=True)
class Outcome:
    policy: str
    trace: str
    load: str
    seed: int
    requests: int  # measured requests, answered or shed
    p50_ms: float
    p95_ms: float
    p99_ms: float
    mean_ms: float
    tpot_p50_ms: float  # median over requests of the mean time for each token after the first
    tpot_p95_ms: float
    e2e_p50_ms: float  # median time to the last token
    e2e_p95_ms: float
    goodput: float  # share of requests whose first token and pace meet the objectives
    hit_ratio: float  # cached share of the prompt tokens of answered requests
    bound: float  # hit_ratio of one infinite cache for all sites
    shed: float  # share of requests that no site accepted
    cross_region: float
    retried: float
    declined: float  # mean number of sites that declined a request
    cut: int  # streams whose site crashed
    started: int  # all started calls, warm-up included
    events: int
    cpu_s: float
    turned_over: float  # evicted tokens, in multiples of the capacity of all caches
    wakes: int
    reasons: dict[str, int]
    bias_ms: dict[str, float]  # mean of actual minus predicted time: total, queue, prefill
    error_ms: dict[str, float]  # mean absolute difference, with the same keys
    dearest: dict[str, int]  # counts of the slowest 5 % of requests by their largest predicted and actual term

    @property
    def of_bound(self) -> float:
        return self.hit_ratio / self.bound if self.bound else 1.0


SLO_TPOT_MS = 100.0


class Tally:
    def __init__(self, slo_ttft_s: float) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._good = 0
        self._tpot: list[float] = []
        self._e2e: list[float] = []
        self.shed = self.cut = 0
        self._prompt = self._cached = self._ideal = 0
        self._cross = self._retried = self._declined = 0
        self._reasons: Counter[str] = Counter()
        self._ttft: list[float] = []
        self._off: list[tuple[float, float, float]] = []  # actual minus predicted times: total, queue, prefill
        self._terms: list[tuple[str, str]] = []

    def answered(
        self, preference: Preference, *, ttft_ms: float, from_router_ms: float, queue_ms: float, prompt: int, cached: int, ideal: int,
        tries: int, declined: int, is_cross: bool, rate: float,
    ) -> None:  # fmt: skip
        self._ttft.append(ttft_ms)
        self._prompt += prompt
        self._cached += cached
        self._ideal += ideal
        self._cross += is_cross
        self._retried += tries > 1
        self._declined += declined
        self._reasons[preference.reason] += 1
        terms = preference.terms
        prefill_ms = 1000 * (prompt - cached) / rate
        queue = terms.get("queue_ahead", terms.get("queue", 0.0)) + terms.get("wake", 0.0)
        total = preference.expected_ms
        self._off.append((from_router_ms - total, queue_ms - queue, prefill_ms - terms.get("prefill", 0.0)))
        actual = {"queue": queue_ms, "prefill": prefill_ms, "lost tries": ttft_ms - from_router_ms}
        actual["path"] = from_router_ms - queue_ms - prefill_ms
        self._terms.append((max(terms, key=lambda name: terms[name], default=""), max(actual, key=lambda k: actual[k])))

    def ended(self, ttft_s: float, decode_s: float, output_tokens: int) -> None:
        """Record the end of a request. `decode_s`: from the first token to the last."""
        tpot_ms = 1000 * decode_s / max(1, output_tokens - 1)
        if output_tokens > 1:
            self._tpot.append(tpot_ms)
        self._e2e.append(1000 * (ttft_s + decode_s))
        self._good += ttft_s <= self._slo_ttft_s and tpot_ms <= SLO_TPOT_MS

    def outcome(
        self, policy: str, trace: str, load: str, seed: int, started: int, events: int, cpu_s: float, turned_over: float, wakes: int
    ) -> Outcome:  # fmt: skip
        p50, p95, p99 = _percentiles(self._ttft, 50, 95, 99)
        tpot50, tpot95 = _percentiles(self._tpot, 50, 95)
        e2e50, e2e95 = _percentiles(self._e2e, 50, 95)
        mean = sum(self._ttft) / max(1, len(self._ttft))
        sent = max(1, len(self._ttft) + self.shed)
        off = np.array(self._off or [(0.0, 0.0, 0.0)])
        names = ("all", "queue", "prefill")
        slow = Counter(terms for terms, ttft in zip(self._terms, self._ttft, strict=True) if ttft >= p95)
        return Outcome(
            policy, trace, load, seed, sent, p50, p95, p99, round(mean, 1), tpot50, tpot95, e2e50, e2e95, self._good / sent,
            self._cached / max(1, self._prompt), self._ideal / max(1, self._prompt), self.shed / sent,
            self._cross / max(1, len(self._ttft)), self._retried / sent,
            self._declined / sent, self.cut, started, events, round(cpu_s, 2), round(turned_over, 2), wakes,
            dict(sorted(self._reasons.items())),
            {name: round(float(value), 1) for name, value in zip(names, off.mean(axis=0), strict=True)},
            {name: round(float(value), 1) for name, value in zip(names, np.abs(off).mean(axis=0), strict=True)},
            {f"{predicted} / {actual}": count for (predicted, actual), count in slow.most_common(6)},
        )  # fmt: skip


def _percentiles(values: list[float], *shares: int) -> list[float]:
    return [round(float(value), 1) for value in np.percentile(np.array(values or [0.0]), shares)]

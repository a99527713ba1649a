"""The traffic of a load: a share of the highest sustainable rate of requests, in closed form.

The bound is an ideal network's: every cache infinite and shared, work spread perfectly, no distance. So a share of one is out of any policy's reach,
and a share says the same of every trace. Both levels were chosen before anything was measured at them.
"""

from dataclasses import dataclass
from functools import cache

from load_tests.sim.site import CHUNK, STEP_GROWTH, STEP_S, SiteSpec
from load_tests.sim.traces import Trace, matched

LOADS = {"moderate": 0.3, "heavy": 0.6}  # means over the day; its peak hour has about 1.3 times as much
QUIET = 0.002  # so little that models fall asleep, for the row on waking
SAMPLED_SESSIONS = 1500


@dataclass(frozen=True, slots=True)
class Shape:
    """The average cost of one session of a trace."""

    turns: float
    computed_tokens: float  # per turn, with an infinite cache
    output_tokens: float  # per turn


@cache
def shape_of(trace: Trace) -> Shape:
    """Measure sessions of another seed; the first third fills the cache."""
    seen: set[bytes] = set()
    tokens = outputs = turns = sessions = 0
    for number in range(SAMPLED_SESSIONS):
        counts = number >= SAMPLED_SESSIONS // 3
        sessions += counts
        for turn in trace.turns(-1 - number, trace.dice(-1, number)):
            if counts:
                turns, outputs = turns + 1, outputs + turn.output_tokens
                tokens += turn.prompt_tokens - matched(turn.prefixes, seen)
            seen.update(prefix.digest for prefix in (*turn.prefixes, turn.answer))
    return Shape(turns / sessions, tokens / turns, outputs / turns)


def capacity(sites: tuple[SiteSpec, ...], shape: Shape) -> float:
    """Return the requests per second of all sites together."""
    return sum(site_capacity(spec, shape) for spec in sites)


def site_capacity(spec: SiteSpec, shape: Shape) -> float:
    """Return the rate at which a site's prefill is always busy, or its permits are all taken.

    The lower of the two.
    """
    low, high = 0.0, spec.prefill_tokens_per_s / shape.computed_tokens
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if _is_bearable(spec, shape, rate) else (low, rate)
    return low


def _is_bearable(spec: SiteSpec, shape: Shape, rate: float) -> bool:
    """Tell whether a site can sustain a rate, by Little's law.

    As many decodes run as start in the time that one takes; its steps are as long as their number and the prefills make them.
    """
    running = 0.0
    for _ in range(200):
        chunk_s = CHUNK / spec.prefill_tokens_per_s + STEP_S * STEP_GROWTH * running
        prefilling = rate * shape.computed_tokens / CHUNK * chunk_s  # share of the time
        if prefilling >= 1 or running >= spec.max_inflight:
            return False
        steps_per_s = prefilling / chunk_s + (1 - prefilling) / (STEP_S * (1 + STEP_GROWTH * running))
        before, running = running, rate * shape.output_tokens / steps_per_s
        if abs(running - before) < 1e-6 * running:
            break
    return running < spec.max_inflight

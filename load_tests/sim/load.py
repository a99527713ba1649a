"""The request rate of a load level: a share of the highest sustainable rate, without a simulation.

The highest rate is that of an ideal network, with one infinite shared cache, perfectly spread work and no distances. So no policy can reach a share
of one, and shares of different traces are comparable. Both levels were chosen before any measurement.
"""

from dataclasses import dataclass
from functools import cache

from load_tests.sim.site import CHUNK, STEP_GROWTH, STEP_S, SiteSpec
from load_tests.sim.traces import Trace, matched

LOADS = {"moderate": 0.3, "heavy": 0.6}  # means over the day; the peak hour has about 1.3 times as much
QUIET = 0.002  # a load so low that models fall asleep: for the row about waking them
SAMPLED_SESSIONS = 1500


@dataclass(frozen=True, slots=True)
class Shape:
    """The average session of a trace."""

    turns: float
    computed_tokens: float  # per turn, with an infinite cache
    output_tokens: float  # per turn


@cache
def shape_of(trace: Trace) -> Shape:
    """Measure sessions of a separate seed; the first third only fills the cache."""
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
    """Return the highest rate that a site sustains.

    Its limit is prefill that is always busy, or all permits in use.
    """
    low, high = 0.0, spec.prefill_tokens_per_s / shape.computed_tokens
    for _ in range(50):
        rate = (low + high) / 2
        low, high = (rate, high) if _is_bearable(spec, shape, rate) else (low, rate)
    return low


def _is_bearable(spec: SiteSpec, shape: Shape, rate: float) -> bool:
    """Tell whether a site can sustain a rate, by Little's law.

    The number of running decodes is the arrival rate times the duration of one, which grows with that number and with prefills.
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

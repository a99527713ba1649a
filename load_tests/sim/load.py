"""How much traffic a load is: the highest rate of requests that the network could bear for ever, in closed form, and shares of it.

The bound is an ideal network's: every cache infinite and shared, work spread perfectly, no distance. So a share of one is out of any policy's
reach, and a share says the same of every trace. Both levels were chosen before anything was measured at them.
"""

from dataclasses import dataclass
from functools import cache

from load_tests.sim.site import DECODE_SHARE, STEP_GROWTH, STEP_S, SiteSpec
from load_tests.sim.traces import Trace, matched

LOADS = {"moderate": 0.3, "heavy": 0.6}  # means over the day; its peak hour has about 1.3 times as much
SAMPLED_SESSIONS = 1500


@dataclass(frozen=True, slots=True)
class Shape:
    """The average cost of one session of a trace."""

    turns: float
    computed_tokens: float  # of a turn, with an infinite cache
    output_tokens: float  # of a turn


@cache
def shape_of(trace: Trace) -> Shape:
    """Measured on sessions of another seed; the first third fills the cache."""
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
    """Requests a second of all sites together."""
    return sum(site_capacity(spec, shape) for spec in sites)


def site_capacity(spec: SiteSpec, shape: Shape) -> float:
    """The rate at which a site's prefill is busy all the time, or its permits are all taken, whichever comes first.

    At a rate `x` there run `r = x * output * step(r)` decodes (Little's law), and they slow prefill down."""
    low, high = 0.0, spec.prefill_tokens_per_s / shape.computed_tokens
    for _ in range(50):
        rate = (low + high) / 2
        alone = rate * shape.output_tokens * STEP_S
        running = alone / (1 - STEP_GROWTH * alone) if STEP_GROWTH * alone < 1 else float("inf")
        share = running / spec.max_inflight
        bearable = share < 1 and rate * shape.computed_tokens < spec.prefill_tokens_per_s * (1 - DECODE_SHARE * share)
        low, high = (rate, high) if bearable else (low, rate)
    return low

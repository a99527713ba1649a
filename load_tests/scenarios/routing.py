"""`make bench-routing`: every policy on every trace of the simulation at both loads, over held-out seeds, with a record and a plot per load.

Simulated time says nothing about this machine; the record's machine only explains the seconds that the runs took.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from edge_router.policy import Policy, dynamo, gorgo, llm_d, smg_cache_aware
from edge_router.policy.cost import Assumptions, CostPolicy
from edge_router.policy.header_affinity import HeaderAffinityPolicy
from edge_router.policy.least_outstanding import LeastOutstandingPolicy
from edge_router.policy.nearest import NearestPolicy
from edge_router.policy.power_of_two import PowerOfTwoPolicy
from edge_router.policy.round_robin import RoundRobinPolicy
from load_tests.records import write_record
from load_tests.sim.load import LOADS
from load_tests.sim.outcome import Outcome
from load_tests.sim.run import simulate
from load_tests.sim.traces import TRACES
from load_tests.sim.world import HELD_OUT_SEEDS, TUNING_SEEDS


@dataclass(frozen=True, slots=True)
class Entry:
    make: Callable[[], Policy]
    parameters: str  # published ones, or the defaults of what it imitates


OURS = "Pilotlight"
POLICIES = {
    OURS: Entry(CostPolicy, str(Assumptions())),
    "nearest": Entry(NearestPolicy, "none"),
    "round robin": Entry(RoundRobinPolicy, "none"),
    "power of two": Entry(PowerOfTwoPolicy, "two sites, uniform; load: published requests and own since"),
    "least outstanding": Entry(LeastOutstandingPolicy, "own requests; the nearer of equals"),
    "header affinity": Entry(HeaderAffinityPolicy, "every session named; new ones to the nearest"),
    "SMG cache-aware": Entry(
        smg_cache_aware.CacheAwarePolicy,
        f"cache_threshold {smg_cache_aware.CACHE_THRESHOLD}, balance_abs_threshold {smg_cache_aware.BALANCE_ABS},"
        f" balance_rel_threshold {smg_cache_aware.BALANCE_REL}",
    ),
    "Dynamo": Entry(
        dynamo.DynamoPolicy, f"overlap weight {dynamo.OVERLAP_WEIGHT}, blocks of {dynamo.BLOCK_TOKENS}, temperature 0"
    ),
    "llm-d": Entry(
        llm_d.WeightedScoresPolicy,
        f"weights prefix {llm_d.PREFIX_WEIGHT}, queue {llm_d.QUEUE_WEIGHT}, KV {llm_d.KV_WEIGHT}",
    ),
    "GORGO": Entry(gorgo.GorgoPolicy, "none: measured rates and round trips"),
}


def main() -> None:
    asked = _arguments()
    began = perf_counter()
    outcomes = []
    for trace in asked.traces:
        for load in asked.loads:
            for policy in asked.policies:
                runs = [
                    simulate(policy, POLICIES[policy].make, TRACES[trace], load, asked.requests, s) for s in asked.seeds
                ]
                outcomes += runs
                print(row(runs), flush=True)
                if asked.explain:
                    print(_explained(runs), flush=True)
    print(f"{perf_counter() - began:.0f} s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="of one run, warm-up included, about")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--explain", action="store_true", help="also what was mispredicted, and which branches decided")
    parser.add_argument("--tuning", dest="seeds", action="store_const", const=TUNING_SEEDS, default=HELD_OUT_SEEDS)
    return parser.parse_args()


def row(runs: Sequence[Outcome]) -> str:
    def mid(name: str, scale: float = 1.0) -> float:
        return scale * statistics.median(getattr(run, name) for run in runs)

    first = runs[0]
    low, high = min(run.p95_ms for run in runs), max(run.p95_ms for run in runs)
    return (
        f"{first.trace:14} {first.load:8} {first.policy:17} p50 {mid('p50_ms'):6.0f}  p95 {mid('p95_ms'):6.0f} [{low:6.0f} {high:6.0f}]"
        f"  p99 {mid('p99_ms'):6.0f}  mean {mid('mean_ms'):5.0f}  hits {mid('hit_ratio', 100):5.1f}/{mid('bound', 100):5.1f} = {mid('of_bound', 100):5.1f} %"
        f"  shed {mid('shed', 100):5.2f} %  cross {mid('cross_region', 100):5.1f} %  ({sum(run.wall_s for run in runs):.1f} s)"
    )


def _explained(runs: Sequence[Outcome]) -> str:
    lines = []
    for run in runs[:1]:
        lines.append(f"    bias {run.bias_ms}  error {run.error_ms}  reasons {run.reasons}")
        lines.append(f"    slowest: {run.dearest}  retried {run.retried:.4f} cut {run.cut}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""`make bench-routing`: every policy on every trace of the simulation, with a record and one small plot per trace.

Simulated time says nothing about this machine; the record's machine only explains the seconds that the runs took.
"""

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from edge_router.policy import Policy
from edge_router.policy.cost import CostPolicy
from edge_router.policy.dynamo import DynamoPolicy
from edge_router.policy.gorgo import GorgoPolicy
from edge_router.policy.header_affinity import HeaderAffinityPolicy
from edge_router.policy.least_outstanding import LeastOutstandingPolicy
from edge_router.policy.llm_d import WeightedScoresPolicy
from edge_router.policy.nearest import NearestPolicy
from edge_router.policy.power_of_two import PowerOfTwoPolicy
from edge_router.policy.round_robin import RoundRobinPolicy
from edge_router.policy.smg_cache_aware import CacheAwarePolicy
from load_tests.records import write_record
from load_tests.sim.plot import bars
from load_tests.sim.run import Outcome, simulate
from load_tests.sim.traces import TRACES

OURS = "cost"
POLICIES: dict[str, Callable[[], Policy]] = {
    OURS: CostPolicy,
    "nearest": NearestPolicy,
    "round robin": RoundRobinPolicy,
    "power of two": PowerOfTwoPolicy,
    "least outstanding": LeastOutstandingPolicy,
    "header affinity": HeaderAffinityPolicy,
    "SMG cache-aware": CacheAwarePolicy,
    "Dynamo": DynamoPolicy,
    "llm-d": WeightedScoresPolicy,
    "GORGO": GorgoPolicy,
}


def run(cell: tuple[str, str, int, int]) -> Outcome:
    policy, trace, requests, seed = cell
    outcome = simulate(policy, POLICIES[policy], TRACES[trace], requests, seed)
    print(row(outcome), flush=True)
    return outcome


def row(outcome: Outcome) -> str:
    return (
        f"{outcome.trace:15} {outcome.policy:18} p50 {outcome.p50_ms:7.0f}  p95 {outcome.p95_ms:7.0f}  p99 {outcome.p99_ms:7.0f} ms"
        f"  hits {100 * outcome.hit_ratio:5.1f} of {100 * outcome.bound:5.1f} %  shed {100 * outcome.shed:5.2f} %"
        f"  cross-region {100 * outcome.cross_region:5.1f} %  ({outcome.requests} requests, {outcome.wall_s:.1f} s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="sent in each cell of the table, about")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--speed",
        type=int,
        default=0,
        metavar="REQUESTS",
        help="instead: one run of our policy on the chat trace, to say how fast it is",
    )
    asked = parser.parse_args()
    if asked.speed:
        outcome = run((OURS, "chat", asked.speed, asked.seed))
        path = write_record(
            "routing-speed", {"requests": outcome.requests, "events": outcome.events, "wall_s": outcome.wall_s}, ()
        )
        print(f"{outcome.requests / outcome.wall_s:.0f} requests/s; {path}")
        return
    cells = [(policy, trace, asked.requests, asked.seed) for trace in asked.traces for policy in asked.policies]
    with ProcessPoolExecutor(asked.processes) as pool:
        outcomes = list(pool.map(run, cells))
    table = [asdict(outcome) for outcome in outcomes]
    path = write_record(
        "routing", {"requests_per_cell": asked.requests, "seed": asked.seed, "cells": table}, ("numpy",)
    )
    for trace in asked.traces:
        rows = [outcome for outcome in outcomes if outcome.trace == trace]
        picture = path.parent / "plots" / f"routing-{trace}.svg"
        picture.parent.mkdir(exist_ok=True)
        title = f"{trace}: time to first token, p50 / p95 (ms; simulated, {rows[0].requests} requests)"
        picture.write_text(
            bars(title, [(r.policy, r.p50_ms, r.p95_ms) for r in rows], highlight=OURS), encoding="utf-8"
        )
    print(path)
    _verdict(outcomes)


def _verdict(outcomes: list[Outcome]) -> None:
    """Where ours is ahead of every baseline, and where it is not."""
    for trace in dict.fromkeys(outcome.trace for outcome in outcomes):
        ours = next((o for o in outcomes if o.trace == trace and o.policy == OURS), None)
        others = [o for o in outcomes if o.trace == trace and o.policy != OURS]
        if ours is None or not others:
            continue
        best, least = min(others, key=lambda o: o.p95_ms), min(o.shed for o in others)
        word = "ahead" if ours.p95_ms < best.p95_ms and ours.shed <= least else "BEHIND"
        print(
            f"{trace}: {word}: p95 {ours.p95_ms:.0f} ms against {best.p95_ms:.0f} ({best.policy}); shed {ours.shed:.4f} against {least:.4f};"
            f" {100 * ours.of_bound:.1f} % of the infinite-cache bound"
        )


if __name__ == "__main__":
    main()

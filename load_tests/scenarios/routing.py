"""`make bench-routing`: every policy on every trace of the simulation at both loads, over held-out seeds, with a record and a plot per load.

Simulated time says nothing about this machine; the record's machine only explains the seconds that the runs took.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec.structs import replace

from edge_router.policy import BackendView, Policy, Preference, RouteRequest, dynamo, gorgo, llm_d, smg_cache_aware
from edge_router.policy.cost import Assumptions, CostPolicy
from edge_router.policy.header_affinity import HeaderAffinityPolicy
from edge_router.policy.least_outstanding import LeastOutstandingPolicy
from edge_router.policy.nearest import NearestPolicy
from edge_router.policy.power_of_two import PowerOfTwoPolicy
from edge_router.policy.round_robin import RoundRobinPolicy
from load_tests.records import spread, write_record
from load_tests.sim.load import LOADS
from load_tests.sim.outcome import Outcome
from load_tests.sim.plot import bars
from load_tests.sim.run import simulate
from load_tests.sim.traces import TRACES
from load_tests.sim.world import CRASHES, HELD_OUT_SEEDS, NUM_ROUTERS, NUM_SITES, PARTITIONS, TUNING_SEEDS
from load_tests.tables.routing import OURS, OURS_ALONE


@dataclass(frozen=True, slots=True)
class Entry:
    make: Callable[[], Policy]
    parameters: str  # published ones, or the defaults of what it imitates


class AcceptingPolicy(CostPolicy):
    """Ours without the sites' help: none declines, as none does for the baselines. What its ranking alone is worth."""

    def rank(self, request: RouteRequest, backends: Sequence[BackendView]) -> list[Preference]:
        return [replace(preference, max_queue_ms=None) for preference in super().rank(request, backends)]


MEASURES = {
    "p50_ms": 1, "p95_ms": 1, "p99_ms": 1, "mean_ms": 1, "of_bound": 4, "hit_ratio": 4, "shed": 5, "cross_region": 4, "retried": 4, "declined": 4,
}  # fmt: skip
POLICIES = {
    OURS: Entry(CostPolicy, str(Assumptions())),
    OURS_ALONE: Entry(AcceptingPolicy, "as above; sites take whatever they are sent"),
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
    known = _kept(asked.resume)
    if asked.keep_others is not None:
        return _beside(known, asked, json.loads(asked.keep_others.read_text(encoding="utf-8")))
    cells = []
    for trace in asked.traces:
        for load in asked.loads:
            for policy in asked.policies:
                runs = [_run(known, asked, policy, trace, load, seed) for seed in asked.seeds]
                cells.append(runs)
                print(row(runs), flush=True)
                if asked.explain:
                    print(_explained(runs), flush=True)
    seconds = sum(run.wall_s for runs in cells for run in runs)
    print(f"{perf_counter() - began:.0f} s, {seconds:.0f} s of simulation")
    if asked.seeds == HELD_OUT_SEEDS:
        path = write_record("routing", _results(asked, cells, seconds), ("numpy",))
        write_plots(path, asked.loads)
        print(path)


def _beside(known: dict[str, Any], asked: argparse.Namespace, record: dict[str, Any]) -> None:
    """Ours anew, the others from an earlier record. Runs replay exactly, so nothing about the others has changed unless the simulation has: of each,
    one cell is simulated again, another trace and load each time, and must be what the record says."""
    earlier = record["results"]
    ours = [name for name in POLICIES if name in (OURS, OURS_ALONE)]
    columns = [(trace, load) for trace in TRACES for load in LOADS]
    by_key = {(cell["trace"], cell["load"], cell["policy"]): cell for cell in earlier["cells"]}
    replayed = []
    for i, name in enumerate(name for name in POLICIES if name not in ours):
        trace, load = columns[(5 * i) % len(columns)]  # five and twelve have no common divisor
        replayed.append([_run(known, asked, name, trace, load, seed) for seed in HELD_OUT_SEEDS])
        if _cell(replayed[-1]) != by_key[trace, load, name]:
            raise SystemExit(f"{name} on {trace} at {load} load is not what the record says: simulate every policy")
        print(f"{name} on {trace} at {load} load is as recorded", flush=True)
    cells = []
    for trace, load in columns:
        for name in ours:
            cells.append([_run(known, asked, name, trace, load, seed) for seed in HELD_OUT_SEEDS])
            print(row(cells[-1]), flush=True)
    results = _results(asked, cells, sum(run.wall_s for runs in (*replayed, *cells) for run in runs))
    for name in ("requests_per_run", "seeds", "network", "loads", "traces"):
        if results[name] != earlier[name]:
            raise SystemExit(f"the record was made with other {name}: simulate every policy")
    changed = [
        name for name in POLICIES if name not in ours and earlier["parameters"].get(name) != results["parameters"][name]
    ]
    if changed:
        raise SystemExit(f"parameters of {', '.join(changed)} are not the record's: simulate every policy")
    fresh = {(cell["trace"], cell["load"], cell["policy"]): cell for cell in results["cells"]}
    results["cells"] = [fresh.get((*column, name)) or by_key[*column, name] for column in columns for name in POLICIES]
    results["others_kept_from"] = {
        "commit": record["commit"], "date": record["date"],
        "replayed_alike": [f"{runs[0].policy}, {runs[0].trace}, {runs[0].load}" for runs in replayed],
    }  # fmt: skip
    path = write_record("routing", results, ("numpy",))
    write_plots(path, LOADS)
    print(path)


def _run(known: dict[str, Any], asked: argparse.Namespace, policy: str, trace: str, load: str, seed: int) -> Outcome:
    key = f"{policy} {trace} {load} {seed} {asked.requests}"
    if key in known:
        return Outcome(**known[key])
    outcome = simulate(policy, POLICIES[policy].make, TRACES[trace], load, asked.requests, seed)
    if asked.resume is not None:
        with asked.resume.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, asdict(outcome)]) + "\n")
    return outcome


def _kept(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _results(asked: argparse.Namespace, cells: list[list[Outcome]], seconds: float) -> dict[str, Any]:
    """Medians and extremes over the seeds: what single runs said stays out of the record."""
    return {
        "requests_per_run": asked.requests,
        "seeds": list(asked.seeds),
        "tuning_seeds": list(TUNING_SEEDS),
        "network": {"sites": NUM_SITES, "routers": NUM_ROUTERS, "crashes": CRASHES, "partitions": PARTITIONS},
        "loads": {
            load: f"{LOADS[load]:.0%} of the highest rate that an ideal network could bear" for load in asked.loads
        },
        "parameters": {name: POLICIES[name].parameters for name in asked.policies},
        "traces": {name: TRACES[name].source for name in asked.traces},
        "simulated_requests": sum(run.begun for runs in cells for run in runs),
        "seconds_on_one_core": round(seconds),
        "cells": [_cell(runs) for runs in cells],
    }


def _cell(runs: Sequence[Outcome]) -> dict[str, Any]:
    figures = {name: spread([getattr(run, name) for run in runs], digits) for name, digits in MEASURES.items()}
    return {"trace": runs[0].trace, "load": runs[0].load, "policy": runs[0].policy, **figures}


def write_plots(record: Path, loads: Iterable[str]) -> None:
    """Draw the plots from the record alone."""
    cells = json.loads(record.read_text(encoding="utf-8"))["results"]["cells"]
    for load in loads:
        groups: dict[str, list[tuple[str, float, float]]] = {}
        for cell in cells:
            if cell["load"] == load:
                bar = (cell["policy"], cell["p50_ms"]["median"], cell["p95_ms"]["median"])
                groups.setdefault(cell["trace"], []).append(bar)
        title = f"Time to first token at {load} load, p50 / p95, ms, simulated: medians of {len(HELD_OUT_SEEDS)} held-out seeds"
        (record.parent / f"routing-{load}.svg").write_text(bars(title, groups, highlight=OURS), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=8_000, help="of one run, warm-up included, about")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--explain", action="store_true", help="also what was mispredicted, and which branches decided")
    parser.add_argument("--tuning", dest="seeds", action="store_const", const=TUNING_SEEDS, default=HELD_OUT_SEEDS)
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="keep each run's figures there, and do not repeat them"
    )
    parser.add_argument(
        "--keep-others",
        type=Path,
        metavar="RECORD",
        help="simulate ours alone, and take the others from a record that still replays",
    )
    return parser.parse_args()


def row(runs: Sequence[Outcome]) -> str:
    def mid(name: str, scale: float = 1.0) -> float:
        return scale * float(statistics.median(getattr(run, name) for run in runs))

    first, hits = runs[0], f"{mid('hit_ratio', 100):5.1f}/{mid('bound', 100):5.1f} = {mid('of_bound', 100):5.1f} %"
    low, high = min(run.p95_ms for run in runs), max(run.p95_ms for run in runs)
    return (
        f"{first.trace:14} {first.load:8} {first.policy:17} p50 {mid('p50_ms'):6.0f}  p95 {mid('p95_ms'):6.0f} [{low:6.0f} {high:6.0f}]"
        f"  p99 {mid('p99_ms'):6.0f}  mean {mid('mean_ms'):5.0f}  hits {hits}"
        f"  shed {mid('shed', 100):5.2f} %  cross {mid('cross_region', 100):5.1f} %  ({sum(run.wall_s for run in runs):.1f} s)"
    )


def _explained(runs: Sequence[Outcome]) -> str:
    lines = []
    for run in runs[:1]:
        lines.append(f"    bias {run.bias_ms}  error {run.error_ms}  reasons {run.reasons}")
        lines.append(f"    slowest: {run.dearest}  retried {run.retried:.4f} declined {run.declined:.3f} cut {run.cut}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

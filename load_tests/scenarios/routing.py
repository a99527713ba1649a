"""`make bench-routing`: every policy on every trace of the simulation at both loads.

Uses held-out seeds. Also measures our policy and the best other one in ten troubles, and the cost of a decision. Writes a record; give a partial run
another `--subject`. `--trace-file` adds a file in Mooncake's format, which is read in place and never copied.

Simulated time says nothing about this machine; the record's machine only matters for the seconds that the runs took, and the decisions' times.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from load_tests.records import spread, write_record
from load_tests.scenarios.routing_scale import decision_costs, status_bytes
from load_tests.sim.contenders import CONTENDERS, Contender
from load_tests.sim.load import LOADS
from load_tests.sim.mooncake import TraceFile
from load_tests.sim.outcome import SLO_TPOT_MS, Outcome
from load_tests.sim.pools import ARRANGEMENTS, WORKLOADS, Found, Pools, arrivals
from load_tests.sim.run import simulate
from load_tests.sim.traces import TRACES, Trace
from load_tests.sim.trouble import NONE, TROUBLES, Trouble
from load_tests.sim.world import CRASHES, HELD_OUT_SEEDS, NUM_ROUTERS, NUM_SITES, PARTITIONS, TUNING_SEEDS
from load_tests.tables.routing import OURS

MEASURES = {
    "p50_ms": 1, "p95_ms": 1, "p99_ms": 1, "mean_ms": 1, "tpot_p50_ms": 1, "tpot_p95_ms": 1, "e2e_p50_ms": 1, "e2e_p95_ms": 1, "goodput": 4,
    "of_bound": 4, "hit_ratio": 4, "shed": 5, "cross_region": 4, "retried": 4, "declined": 4, "turned_over": 2, "wakes": 0,
}  # fmt: skip
# traces, at heavy load: a light-tailed one, one with long sessions, a heavy-tailed one
TUNED_ON = ("chat", "agent", "documents")
TUNING_REQUESTS = 4_000
LONGER = {"agent": 2}  # factor of a trace's number of requests: an agent's sessions are six times as long
TROUBLED = (OURS, "llm-d, declining")
TROUBLED_TRACE = "chat"
FEW_SEEDS = 2  # troubles and pools are measured with this many of the record's seeds
POOL_LOADS = (0.3, 0.6)


class Sources(NamedTuple):
    """The measurements that a record contains."""

    simulate: Callable[..., Outcome] = simulate
    decisions: Callable[[], dict[str, Any]] = decision_costs
    statuses: Callable[[], dict[str, Any]] = status_bytes


def main(arguments: Sequence[str] | None = None, sources: Sources = Sources()) -> None:  # noqa: B008 - it is frozen
    asked = _arguments(arguments)
    if asked.tune:
        return _tune(asked.policies, sources)
    began = perf_counter()
    traces: dict[str, Trace | TraceFile] = {name: TRACES[name] for name in asked.traces}
    if asked.trace_file is not None:
        file = TraceFile.read(asked.trace_file)
        traces[file.name] = file
    runs_of = partial(_runs, sources, _kept(asked.resume), asked)
    cells = []
    for trace in traces.values():
        for load in asked.loads:
            for policy in asked.policies:
                if runs := runs_of(policy, trace, load):
                    cells.append(runs)
                    print(row(runs), flush=True)
                    if asked.explain:
                        print(_explained(runs), flush=True)
    troubled = {
        (policy, trouble.name): runs_of(policy, TRACES[TROUBLED_TRACE], "heavy", trouble, FEW_SEEDS)
        for trouble in (TROUBLES.values() if asked.troubles else ())
        for policy in TROUBLED
    }
    troubled = {key: runs for key, runs in troubled.items() if runs}
    for (_, trouble_name), runs in troubled.items():
        print(f"{trouble_name}: {row(runs)}", flush=True)
    quiet = [run for policy in asked.quiet for run in runs_of(policy, TRACES["chat"], "quiet")]
    results = _results(sources, asked, traces, cells, troubled, quiet)
    print(f"{perf_counter() - began:.0f} s, {results['seconds_on_one_core']} s of simulation")
    if asked.seeds != TUNING_SEEDS:
        path = write_record(asked.subject, results, ("numpy",))
        print(path)


def _tune(policies: Iterable[str], sources: Sources) -> None:
    """Try every grid on the tuning seed.

    The score, where less is better, is the mean of log p95 + log p99 over the traces.
    """
    for name in policies:
        contender, tried = CONTENDERS[name], []
        for parameters in contender.grid:
            one = Contender(contender.make_with, (parameters,))
            runs = [
                sources.simulate(name, one.make, TRACES[trace], "heavy", TUNING_REQUESTS, TUNING_SEEDS[0])
                for trace in TUNED_ON
            ]
            loss = statistics.fmean(math.log(run.p95_ms) + math.log(run.p99_ms) for run in runs)
            tried.append((loss, str(dict(parameters))))
            print(f"{name}: {loss:.3f} {dict(parameters)} {[round(run.p95_ms) for run in runs]}", flush=True)
        print(f"{name}: best {min(tried)[1]}", flush=True)


def _runs(
    sources: Sources, known: dict[str, Any], asked: argparse.Namespace, policy: str, trace: Trace | TraceFile, load: str, trouble: Trouble = NONE,
    most_seeds: int | None = None,
) -> list[Outcome]:  # fmt: skip
    runs = [_run(sources, known, asked, policy, trace, load, seed, trouble) for seed in asked.seeds[:most_seeds]]
    return [run for run in runs if run is not None]


def _run(
    sources: Sources, known: dict[str, Any], asked: argparse.Namespace, policy: str, trace: Trace | TraceFile, load: str, seed: int, trouble: Trouble
) -> Outcome | None:  # fmt: skip
    requests = LONGER.get(trace.name, 1) * asked.requests // (4 if load == "quiet" else 1)
    key = f"{policy} {trace.name} {load} {seed} {requests} {trouble.name}"
    if key in known:
        return Outcome(**known[key])
    if asked.known:
        return None
    outcome = sources.simulate(policy, CONTENDERS[policy].make, trace, load, requests, seed, trouble=trouble)
    if asked.resume is not None:
        with asked.resume.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, asdict(outcome)]) + "\n")
    return outcome


def _kept(path: Path | None) -> dict[str, Any]:
    if path is None or not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _results(
    sources: Sources, asked: argparse.Namespace, traces: dict[str, Trace | TraceFile], cells: list[list[Outcome]],
    troubled: dict[tuple[str, str], list[Outcome]], quiet: list[Outcome],
) -> dict[str, Any]:  # fmt: skip
    """Return medians and extremes over the seeds; results of single runs are not recorded."""
    runs = [run for cell in (*cells, *troubled.values(), quiet) for run in cell]
    return {
        "requests_per_run": asked.requests,
        "times_as_many": LONGER,
        "seeds": list(asked.seeds),
        "tuning": {
            "seed": TUNING_SEEDS[0], "traces": list(TUNED_ON), "load": "heavy", "requests": TUNING_REQUESTS,
            "ours": "by 40 variants of its terms at two tuning seeds and 6,000 requests, then 15 of its bounds at eight and 4,000, "
            "then 30 of its bounds and of declining at four to twelve and 3,000 to 10,000",
            "others": "each only by its grid, when second choices could not decline yet",
        },
        "network": {"sites": NUM_SITES, "routers": NUM_ROUTERS, "crashes": CRASHES, "partitions": PARTITIONS},
        "loads": {
            load: f"{LOADS[load]:.0%} of the highest rate that an ideal network could bear" for load in asked.loads
        },
        "objectives": {
            **{name: f"first token within {trace.slo_ttft_s:g} s" for name, trace in traces.items()},
            "all": f"{SLO_TPOT_MS:g} ms for each further token, a request's mean",
        },
        "parameters": {name: _parameters(CONTENDERS[name]) for name in asked.policies},
        "traces": {name: trace.source for name, trace in traces.items()},
        "simulated_requests": sum(run.started for run in runs),
        "seconds_on_one_core": round(sum(run.cpu_s for run in runs)),
        "cells": [_cell(each) for each in cells],
        "troubles": [{**_cell(each), "trouble": trouble} for (_, trouble), each in troubled.items()],
        "quiet": [_cell([run for run in quiet if run.policy == policy]) for policy in dict.fromkeys(run.policy for run in quiet)],
        "decisions": sources.decisions(),
        "statuses": sources.statuses(),
        "pools": _pools(asked.seeds[:FEW_SEEDS], asked.pool_requests) if asked.pools else [],
    }  # fmt: skip


def _pools(seeds: Sequence[int], requests: int) -> list[dict[str, Any]]:
    """Simulate the devices of one site, with and without some that compute prompts for the others."""
    cells = []
    for workload in WORKLOADS:
        for load in POOL_LOADS:
            drawn = [arrivals(workload, load, requests, seed) for seed in seeds]
            for arrangement in ARRANGEMENTS:
                runs = [Pools(arrangement, workload).run(each) for each in drawn]
                figures = {name: spread([getattr(run, name) for run in runs]) for name in Found._fields}
                cells.append({"workload": workload.name, "load": load, "arrangement": arrangement.name, **figures})
    return cells


def _parameters(contender: Contender) -> dict[str, Any]:
    grid = [
        {name: value if isinstance(value, int | float) else asdict(value) for name, value in each.items()}
        for each in contender.grid
    ]
    return {"chosen": grid[contender.chosen], "grid": grid}


def _cell(runs: Sequence[Outcome]) -> dict[str, Any]:
    figures = {name: spread([getattr(run, name) for run in runs], digits) for name, digits in MEASURES.items()}
    return {"trace": runs[0].trace, "load": runs[0].load, "policy": runs[0].policy, **figures}


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="about so many per run, with warm-up")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=list(TRACES))
    parser.add_argument(
        "--trace-file", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, or .xz of them"
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--policies", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument(
        "--quiet", nargs="*", choices=CONTENDERS, default=list(TROUBLED), help="also where models sleep"
    )
    parser.add_argument("--no-troubles", dest="troubles", action="store_false", help="leave out the rows on robustness")
    parser.add_argument("--no-pools", dest="pools", action="store_false", help="do not simulate a site's devices")
    parser.add_argument("--pool-requests", type=int, default=3_000, help="requests per run of a site's devices")
    parser.add_argument("--explain", action="store_true", help="show prediction errors and deciding terms")
    parser.add_argument("--tune", action="store_true", help="try the grids of --policies instead, on a tuning seed")
    parser.add_argument("--tuning", dest="seeds", action="store_const", const=TUNING_SEEDS, default=HELD_OUT_SEEDS[:3])
    parser.add_argument("--seeds", type=int, nargs="+", help="seeds, instead of three held-out ones")
    parser.add_argument("--subject", default="routing", help="of the record")
    parser.add_argument(
        "--resume", type=Path, metavar="FILE", help="append each run's figures, and skip runs that it has"
    )
    parser.add_argument("--known", action="store_true", help="simulate nothing: record the runs of --resume")
    return parser.parse_args(given)


def row(runs: Sequence[Outcome]) -> str:
    def mid(name: str, scale: float = 1.0) -> float:
        return scale * float(statistics.median(getattr(run, name) for run in runs))

    first, hits = runs[0], f"{mid('hit_ratio', 100):5.1f}/{mid('bound', 100):5.1f} = {mid('of_bound', 100):5.1f} %"
    low, high = min(run.p95_ms for run in runs), max(run.p95_ms for run in runs)
    return (
        f"{first.trace:14} {first.load:8} {first.policy:17} p50 {mid('p50_ms'):6.0f}  p95 {mid('p95_ms'):6.0f} [{low:6.0f} {high:6.0f}]"
        f"  p99 {mid('p99_ms'):6.0f}  e2e p95 {mid('e2e_p95_ms'):6.0f}  tpot p95 {mid('tpot_p95_ms'):4.0f}  good {mid('goodput', 100):5.1f} %"
        f"  hits {hits}  shed {mid('shed', 100):5.2f} %  cross {mid('cross_region', 100):5.1f} %  ({sum(run.cpu_s for run in runs):.1f} s)"
    )


def _explained(runs: Sequence[Outcome]) -> str:
    lines = []
    for run in runs[:1]:
        lines.append(f"    bias {run.bias_ms}  error {run.error_ms}  reasons {run.reasons}")
        lines.append(f"    slowest: {run.dearest}  retried {run.retried:.4f} declined {run.declined:.3f} cut {run.cut}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

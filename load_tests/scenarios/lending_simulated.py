"""Lending in a simulated network of 330 sites. `make bench-lending-simulated FILE=...` runs it.

python -m load_tests.scenarios.lending_simulated FILE

A request has a fixed site near its client, or spills over to the site that is predicted to answer first; with and without lending. With lending, each
site borrows from eight others over links of 0.5 to 10 Gbit/s (load_tests/sim/lending.py). Prompts have the KV blocks of a dense or of a hybrid model.
Spill-over with lending comes twice: routers know what a site could borrow, or rank it as if it had no lenders.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from load_tests.records import percentiles, spread, write_record
from load_tests.sim.cities import load_cities
from load_tests.sim.lending import GBIT_PER_S, KV_SIZES, NUM_DRAWN, NUM_NEAREST, KvSize
from load_tests.sim.load import LOADS
from load_tests.sim.mooncake import TraceFile
from load_tests.sim.outcome import Outcome
from load_tests.sim.policies.static import static_policies
from load_tests.sim.run import Simulation, finish, prepare
from load_tests.sim.world import HELD_OUT_SEEDS, build_world
from pilotlight.edge_router.routing.cost import CostPolicy

NUM_SITES = 330
MEASURES = {
    "p50_ms": 1, "p95_ms": 1, "p99_ms": 1, "mean_ms": 1, "tpot_p95_ms": 1, "shed": 5, "hit_ratio": 4, "cross_region": 4,
}  # fmt: skip


class Arm(NamedTuple):
    name: str
    spills: bool  # whether a request goes to the site that is predicted to answer first, instead of a fixed one
    lends: bool = False
    is_known: bool = True  # whether routers know what sites could borrow


ARMS = (
    Arm("fixed sites", spills=False),
    Arm("fixed sites, lending", spills=False, lends=True),
    Arm("spill-over", spills=True),
    Arm("spill-over, lending unknown to routers", spills=True, lends=True, is_known=False),
    Arm("spill-over, lending", spills=True, lends=True),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="JSON lines in Mooncake's format, or .xz of them; read in place")
    parser.add_argument("--requests", type=int, default=12_031, help="the first requests of the file, with warm-up")
    parser.add_argument("--sites", type=int, default=NUM_SITES)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=HELD_OUT_SEEDS[:3])
    parser.add_argument("--no-record", action="store_true")
    asked = parser.parse_args()
    trace, cells = TraceFile.read(asked.file), list[dict[str, Any]]()
    for load in asked.loads:
        for kv in KV_SIZES.values():
            for arm in ARMS:
                if arm.name not in asked.arms or (not arm.lends and kv is not KV_SIZES["dense"]):
                    continue  # without lending no KV blocks are moved
                runs = [_run(arm, kv, trace, load, asked.requests, seed, asked.sites) for seed in asked.seeds]
                cells.append(_cell(arm, kv, runs))
                print(_line(cells[-1]), flush=True)
    results = {
        "trace": trace.name,
        "requests_per_run": asked.requests,
        "seeds": list(asked.seeds),
        "network": {
            "sites": asked.sites, "lenders_nearest": NUM_NEAREST, "lenders_drawn": NUM_DRAWN, "links_gbit_per_s": list(GBIT_PER_S),
        },
        "kv_bytes": {kv.name: {"token": kv.token_bytes, "state": kv.state_bytes} for kv in KV_SIZES.values()},
        "loads": {load: LOADS[load] for load in asked.loads},
        "cells": cells,
    }  # fmt: skip
    if not asked.no_record:
        print(write_record("lending-simulated", results, ("numpy",)))


def _run(
    arm: Arm, kv: KvSize, trace: TraceFile, load: str, requests: int, seed: int, num_sites: int
) -> tuple[Outcome, Simulation]:
    cities = load_cities()
    static = static_policies(build_world(cities, seed, num_sites=num_sites), cities)
    simulation = prepare(
        CostPolicy if arm.spills else lambda: next(static), trace, load, requests, seed, num_sites=num_sites, kv=kv if arm.lends else None
    )  # fmt: skip
    if simulation.lending is not None:
        simulation.lending.is_published = arm.is_known
    return finish(simulation, arm.name, trace.name, load), simulation


def _cell(arm: Arm, kv: KvSize, runs: Sequence[tuple[Outcome, Simulation]]) -> dict[str, Any]:
    outcomes = [outcome for outcome, _ in runs]
    figures = {name: spread([getattr(each, name) for each in outcomes], digits) for name, digits in MEASURES.items()}
    lending = [simulation.lending for _, simulation in runs if simulation.lending is not None]
    cell: dict[str, Any] = {"arm": arm.name, "load": outcomes[0].load, "kv": kv.name if arm.lends else "", **figures}
    cell["cpu_s"] = round(sum(each.cpu_s for each in outcomes), 1)
    if lending:
        started = [simulation.started for _, simulation in runs]
        shares = [each.counts["lent"] / number for each, number in zip(lending, started, strict=True)]
        cell["lent"] = spread(shares, 4)
        cell["outcomes"] = {
            name: sum(each.counts[name] for each in lending) for name in ("lent", "declined", "given up", "computed")
        }
        overruns = [overrun for each in lending for overrun in each.overruns]
        cell["measured_over_predicted"] = percentiles(overruns) if overruns else None
    return cell


def _line(cell: dict[str, Any]) -> str:
    times = "  ".join(f"{name} {cell[f'{name}_ms']['median'] / 1000:7.2f} s" for name in ("p50", "p95", "p99", "mean"))
    lent = f"  lent {cell['lent']['median']:.1%} {cell['outcomes']}" if "lent" in cell else ""
    return f"{cell['load']:9} {cell['kv']:7} {cell['arm']:40} {times}  shed {cell['shed']['median']:.2%}{lent}  ({cell['cpu_s']} s)"


if __name__ == "__main__":
    main()

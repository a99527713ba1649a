"""The record of routing in simulated time: ours beside the best of the others, trace by trace and load by load."""

from collections.abc import Iterable

from load_tests.records import Record

OURS, OURS_ALONE, ORACLE = "Pilotlight", "no declining", "oracle"


def rows(results: Record) -> Iterable[list[str]]:
    yield [
        "trace, load",
        "p50 / p95 / p99, ms",
        "p95 over seeds",
        "p95, none declines",
        "best other p95 (its p50)",
        "of infinite cache",
        "shed, least other",
        "cross-region, best other's",
    ]
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for cell in results["cells"]:
        cells.setdefault((cell["trace"], cell["load"]), {})[cell["policy"]] = cell
    for (trace, load), by_policy in cells.items():
        ours, alone = by_policy[OURS], by_policy[OURS_ALONE]
        others = [cell for name, cell in by_policy.items() if name not in (OURS, OURS_ALONE, ORACLE)]
        best = min(others, key=lambda cell: mid(cell, "p95_ms"))
        times = " / ".join(f"{mid(ours, name):,.0f}" for name in ("p50_ms", "p95_ms", "p99_ms"))
        span = f"{ours['p95_ms']['min']:,.0f} to {ours['p95_ms']['max']:,.0f}"
        found = f"{mid(ours, 'of_bound'):.1%}" if mid(ours, "hit_ratio") > 0.01 else ""
        shed = f"{mid(ours, 'shed'):.2%}, {min(mid(cell, 'shed') for cell in others):.2%}"
        cross = f"{mid(ours, 'cross_region'):.0%}, {mid(best, 'cross_region'):.0%}"
        other = f"{mid(best, 'p95_ms'):,.0f} ({mid(best, 'p50_ms'):,.0f}) {best['policy']}"
        yield [f"{trace}, {load}", times, span, f"{mid(alone, 'p95_ms'):,.0f}", other, found, shed, cross]


def mid(cell: Record, name: str) -> float:
    return float(cell[name]["median"])

"""The record of functions: cold starts, warm calls, rates, and the effect of hostile neighbours."""

from collections.abc import Iterable

from load_tests.records import Record


def speeds(results: Record) -> Iterable[list[str]]:
    targets = results["targets"]
    yield ["", "p50", "p95", "p99", "n", "target"]
    for name, values in results["cold_ms"].items():
        yield [f"cold start: {name}, ms", *_percentiles(values), f"{targets[name.partition(',')[0]]:g}"]
    for name, values in results["warm_ms"].items():
        yield [f"warm: a {name}, ms", *_percentiles(values), ""]
    yield [
        "what a function adds to a route, ms",
        f"{results['warm_overhead_p50_ms']:g}",
        "",
        "",
        "",
        f"{targets['warm overhead']:g}",
    ]
    for name in ("function", "route"):
        yield [f"first token of a stream: {name}, ms", *_percentiles(results["first_token_ms"][name]), ""]
    added = results["first_token_ms"]["added_p50_ms"]
    yield ["what env.AI adds to the first token, ms", f"{added:g}", "", "", "", f"{targets['first token added']:g}"]
    for row in results["rates"]:
        name = f"{row['requests_per_s']:,.0f} requests/s: {row['server']}, {row['connections']} connections, ms"
        yield [name, *_percentiles(row["latency_ms"]), ""]


def neighbours(results: Record) -> Iterable[list[str]]:
    """Show medians over the rounds, and in brackets each round's ratio."""
    hostile = results["hostile"]
    target = f"{results['targets']['p99 beside hostile']:g}"
    per_s = f"{hostile['requests_per_s']:g} requests/s"
    yield [f"p99 of a function at {per_s}, ms, beside one that", "in quiet", "beside", "ratio", "lost", "target"]
    for row in hostile["rows"]:
        each = ", ".join(f"{one['ratio']:.2f}" for one in row["rounds"])
        figures = [f"{row[key]:.2f}" for key in ("quiet_p99_ms", "beside_p99_ms")]
        yield [row["beside"], *figures, f"{row['ratio']:.2f} ({each})", str(row["lost"]), target]


def _percentiles(values: Record) -> list[str]:
    return [*(f"{values[key]:.2f}" for key in ("p50", "p95", "p99")), str(values["n"])]

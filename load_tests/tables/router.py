"""The records of the router: added latency, a site's death, half an hour of faults."""

from collections.abc import Iterable

from load_tests.records import Record

SLOPES = {
    "rss_mib": "memory of the router, MiB", "sockets": "its file descriptors", "tasks": "its tasks",
    "shared_mib": "shared memory of all sites, MiB", "temporary_files": "temporary folders",
}  # fmt: skip


def overhead(results: Record) -> Iterable[list[str]]:
    """Show lines for each task and a column per router: the added latency, and the rate."""
    rows = results["rows"]
    names = [name for name in dict.fromkeys(row["router"] for row in rows) if name != "no router"]
    by_name = {(row["task"], row["router"]): row for row in rows}
    versions = results["versions"]
    yield ["added ms, p50 / p99", *(f"{name} {versions[name]}" if name in versions else name for name in names)]
    for task in dict.fromkeys(row["task"] for row in rows):
        kinds = {"first": "first token", "token": "each token"} if "stream" in task else {"whole": "answer"}
        for kind, words in kinds.items():
            cells = []
            for name in names:
                row = by_name[task, name]
                both = [row.get(f"added_{kind}_{percent}_ms") for percent in ("p50", "p99")]
                cells.append("-" if None in both else " / ".join(f"{one['median']:.2f}" for one in both if one))
            yield [f"{task}: {words}", *cells]
        if "stream" not in task:
            cells = [
                f"{by_name[task, name]['rate']:,.0f}, {1e3 / by_name[task, name]['cpu_ms']:,.0f}" for name in names
            ]
            yield [f"{task}: per second, per second of its processor time", *cells]


def features(results: Record) -> Iterable[list[str]]:
    """Show the processor time of an answer for each feature."""
    found: dict[str, dict[str, float]] = results["features_cpu_us"]
    yield ["processor time, us", *(f"each answer, {task}" for task in next(iter(found.values())))]
    for name, times in found.items():
        yield [name, *(f"{us:,.0f}" for us in times.values())]


def account_timing(results: Record) -> Iterable[list[str]]:
    """Show how much an account could learn about another one's prompts."""
    yield [
        f"{results['pairs']} pairs of prompts of {results['prompt_tokens']:,} tokens",
        "first token p50, ms",
        "cached tokens",
    ]
    words = {"others": "sent before by another account", "nobodys": "never sent before", "own": "sent before by itself"}
    for name, what in words.items():
        yield [what, f"{results['first_token_ms'][name]:,.1f}", f"{results['cached_tokens'][name]:,}"]
    low, high = results["difference_95_ms"]
    yield ["mean difference of the first two (95 %)", f"{results['difference_ms']:.1f} ({low:.1f} to {high:.1f})", ""]


def soak(results: Record) -> Iterable[list[str]]:
    started, ended = sum(results["begun"].values()), sum(results["ended"].values())
    finished = sum(count for name, count in results["ended"].items() if name.endswith(": finished"))
    faults = ", ".join(f"{count} {name}" for name, count in sorted(results["faults"].items()))
    yield [f"{results['minutes']:g} minutes, {results['clients']} clients", ""]
    yield ["requests started, ended", f"{started:,}, {ended:,}"]
    yield ["of these finished with exactly the tokens of the undisturbed run", f"{finished:,}"]
    yield ["faults", faults]
    yield ["violations", str(results["num_wrong"])]
    for name, words in {
        "rss_mib": "memory of the router, MiB",
        "sockets": "its file descriptors",
        "tasks": "its tasks",
    }.items():
        yield [
            f"{words}, after the first minute and at the end",
            f"{results['before'][name]:g}, {results['after'][name]:g}",
        ]
    for name, found in results.get("slopes", {}).items():
        if name in SLOPES:
            yield [f"{SLOPES[name]}, growth per hour", f"{found['per_hour']:g} ± {found['noise']:g}"]


def site_death(results: Record) -> Iterable[list[str]]:
    yield ["", "streams", "disturbed", "continued", "lost", "with the undisturbed run's tokens", "pause p50 / p99, ms"]
    for fault, found in results.items():
        counts = [str(found[name]) for name in ("streams", "disturbed", "continued", "lost", "same_tokens")]
        yield [fault, *counts, f"{found['pause_ms']['p50']:,.0f} / {found['pause_ms']['p99']:,.0f}"]


def http_servers(results: Record) -> Iterable[list[str]]:
    lines = {(line["route"], line["server"]): line for line in results["lines"]}
    servers = list(dict.fromkeys(server for _, server in lines))
    yield ["per second, per second of its processor time", *servers]
    for route in dict.fromkeys(route for route, _ in lines):
        found = [lines[route, server] for server in servers]
        yield [route, *(f"{line['per_s']:,.0f}, {line['per_cpu_s']:,.0f}" for line in found)]


def faults(results: Record) -> Iterable[list[str]]:
    """Show a line for each fault, and columns for each number of the router's workers."""
    found = {(row["fault"], row["workers"]): row for row in results["rows"] if "skipped" not in row}
    workers = sorted({number for _, number in found})
    yield [
        "workers of the router",
        *(words for number in workers for words in (f"{number}: same tokens", "longest pause, s")),
    ]
    for fault in dict.fromkeys(fault for fault, _ in found):
        cells: list[str] = []
        for row in (found.get((fault, number)) for number in workers):
            cells += (
                ("-", "-") if row is None else (f"{row['same']} of {row['streams']}", f"{row['longest_pause_s']:.1f}")
            )
        yield [fault, *cells]


def attacks(results: Record) -> Iterable[list[str]]:
    yield ["", "sent", "answered with", "/livez p99 of router and site, ms", "beside as many well-formed requests, ms"]
    for row in results["rows"]:
        p99, beside = (
            ", ".join(f"{row[at][name]:.0f}" for at in ("router", "site")) for name in ("p99_ms", "beside_p99_ms")
        )
        yield [row["attack"], f"{row['sent']:,}", " ".join(row["answers"]), p99, beside]

"""The record of routing in simulated time: ours beside the best other policy, by trace and load."""

import statistics
from collections.abc import Iterable

from load_tests.records import Record

OURS, OURS_ALONE, ORACLE = "Pilotlight", "no declining", "oracle"


def rows(results: Record) -> Iterable[list[str]]:
    """Return the table without the columns of policies that were left out."""
    whole = list(_rows(results))
    shown = [i for i in range(len(whole[0])) if any(line[i] for line in whole[1:])]
    return [[line[i] for i in shown] for line in whole]


def _rows(results: Record) -> Iterable[list[str]]:
    yield [
        "trace, load",
        "p50 / p95 / p99, ms",
        "p95, none declines",
        "best other p95",
        "best other p99",
        "oracle p95 / p99",
        "each token p95, ms",
        "last token p95, s",
        "goodput, best other's",
        "of infinite cache",
        "shed",
    ]
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for cell in results["cells"]:
        cells.setdefault((cell["trace"], cell["load"]), {})[cell["policy"]] = cell
    for (trace, load), by_policy in cells.items():
        ours = by_policy[OURS]
        others = [
            cell
            for name, cell in by_policy.items()
            if name not in (OURS, OURS_ALONE, ORACLE) and _seeds(cell) == _seeds(ours)
        ]
        found = f"{mid(ours, 'of_bound'):.1%}" if mid(ours, "hit_ratio") > 0.01 else ""
        yield [
            f"{trace}, {load}",
            " / ".join(f"{mid(ours, name):,.0f}" for name in ("p50_ms", "p95_ms", "p99_ms")),
            f"{mid(by_policy[OURS_ALONE], 'p95_ms'):,.0f}" if OURS_ALONE in by_policy else "",
            _best(others, "p95_ms"),
            _best(others, "p99_ms"),
            " / ".join(f"{mid(by_policy[ORACLE], name):,.0f}" for name in ("p95_ms", "p99_ms"))
            if ORACLE in by_policy
            else "",
            f"{mid(ours, 'tpot_p95_ms'):,.0f}",
            f"{mid(ours, 'e2e_p95_ms') / 1000:,.1f}",
            f"{mid(ours, 'goodput'):.1%}, {max(mid(cell, 'goodput') for cell in others):.1%}",
            found,
            f"{mid(ours, 'shed'):.2%}",
        ]


def policy_rows(results: Record, load: str) -> Iterable[list[str]]:
    """Return p95 and p99 of every policy in every trace, one line each.

    A policy's number of seeds is added if it differs from the record's.
    """
    cells = {(cell["policy"], cell["trace"]): cell for cell in results["cells"] if cell["load"] == load}
    traces = list(dict.fromkeys(trace for _, trace in cells))
    yield [f"p95 / p99, s, {load} load", *traces]
    for policy in dict.fromkeys(policy for policy, _ in cells):
        shown = [cells.get((policy, trace)) for trace in traces]
        seeds = {_seeds(cell) for cell in shown if cell is not None} - {len(results["seeds"])}
        name = f"{policy} ({', '.join(map(str, sorted(seeds)))} seed)" if seeds else policy
        yield [name, *(_tail(cell) if cell is not None else "" for cell in shown)]


def worst_rows(results: Record) -> Iterable[list[str]]:
    """Compare each policy that had all seeds with the best one except the oracle.

    The columns are the ratio in the median and the worst cell, and the numbers of cells in which the policy is the best and within 5 %.
    """
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for cell in results["cells"]:
        if cell["policy"] != ORACLE and _seeds(cell) == len(results["seeds"]):
            cells.setdefault((cell["trace"], cell["load"]), {})[cell["policy"]] = cell
    tails = ("p95_ms", "p99_ms")
    yield ["over the best", "p95: median, worst", "best, within 5 %", "p99: median, worst", "best, within 5 %"]
    policies = list(dict.fromkeys(policy for by_policy in cells.values() for policy in by_policy))
    over = {policy: [_over_best(cells, policy, name) for name in tails] for policy in policies}
    for policy in sorted(policies, key=lambda policy: max(over[policy][0])):
        line = [policy]
        for ratios in over[policy]:
            best, near = sum(ratio == 1 for ratio in ratios), sum(ratio <= 1.05 for ratio in ratios)
            line += [f"{statistics.median(ratios):.2f}, {max(ratios):.2f}", f"{best}, {near} of {len(ratios)}"]
        yield line


def _seeds(cell: Record) -> int:
    return int(cell["p95_ms"]["n"])


def _over_best(cells: dict[tuple[str, str], dict[str, Record]], policy: str, name: str) -> list[float]:
    return [
        mid(by_policy[policy], name) / min(mid(cell, name) for cell in by_policy.values())
        for by_policy in cells.values()
        if policy in by_policy
    ]


def _tail(cell: Record) -> str:
    return f"{mid(cell, 'p95_ms') / 1000:.2f} / {mid(cell, 'p99_ms') / 1000:.2f}"


def trouble_rows(results: Record) -> Iterable[list[str]]:
    """Return, by trouble, each policy's p95, absolute and relative to its own without trouble."""
    policies = list(dict.fromkeys(cell["policy"] for cell in results["troubles"]))
    yield ["chat, heavy load: p95, ms", *policies]
    base = {cell["policy"]: mid(cell, "p95_ms") for cell in results["troubles"] if cell["trouble"] == "none"}
    for trouble in dict.fromkeys(cell["trouble"] for cell in results["troubles"]):
        at = {cell["policy"]: mid(cell, "p95_ms") for cell in results["troubles"] if cell["trouble"] == trouble}
        yield [trouble, *(f"{at[policy]:,.0f} ({at[policy] / base[policy]:.2f})" for policy in policies)]


def scale_rows(results: Record) -> Iterable[list[str]]:
    """Return the cost of a decision by the number of sites, and the size of their statuses."""
    yield ["", *(f"{number} sites" for number in results["decisions"])]
    yield ["a decision, ms of processor time", *(f"{at['rank_us'] / 1000:.2f}" for at in results["decisions"].values())]
    yield ["llm-d's", *(f"{at['llm_d_rank_us'] / 1000:.2f}" for at in results["decisions"].values())]
    names = {
        "full_bytes": "with full digests",
        "changes_bytes": "with their changes",
        "without_digest_bytes": "without digests",
    }
    for key, name in names.items():
        if (size := results["statuses"].get(key)) is not None:
            yield [
                f"statuses a second {name}, Mbit",
                *(f"{8e-6 * size * int(number):,.1f}" for number in results["decisions"]),
            ]


def table_rows(results: Record) -> Iterable[list[str]]:
    """Return the size of a router's table of conversations, and of a site's digest of them."""
    plan = results["statuses"].get("sessions")
    yield ["", "planned"]
    if plan is None:
        return
    yield [
        "conversations of the network, sites and routers",
        f"{plan['conversations']:,}, {plan['sites']:,}, {plan['routers']:,}",
    ]
    yield ["prefixes that a conversation leaves", f"{plan['prefixes']}"]
    yield [
        "bytes of memory: a prefix, a conversation",
        f"{plan['prefix_bytes']:,.0f}, {plan['conversation_bytes']:,.0f}",
    ]
    yield ["a router's share of them, MiB", f"{plan['table_mib']:,.0f}"]
    yield [
        "entries that the share needs, `session_entries` as it is",
        f"{plan['entries']:,}, {plan['default_entries']:,}",
    ]
    yield ["share of a site's prefixes that it publishes", f"{plan['published']:.1%}"]


def pool_rows(results: Record) -> Iterable[list[str]]:
    """Return the results of each arrangement of a site's devices: medians over seeds."""
    pools = results.get("pools", [])
    names = list(dict.fromkeys(cell["arrangement"] for cell in pools))
    yield ["workload, load: p90 of TTFT / p90, p99 of ITL, ms", *names]
    for workload, load in dict.fromkeys((cell["workload"], cell["load"]) for cell in pools):
        line = [f"{workload}, {load:.0%}"]
        for cell in pools:
            if (cell["workload"], cell["load"]) == (workload, load):
                line.append(
                    f"{mid(cell, 'ttft_p90_ms'):,.0f} / {mid(cell, 'itl_p90_ms'):.0f}, {mid(cell, 'itl_p99_ms'):.0f}"
                    + (f" ({mid(cell, 'handed_over'):.0%} handed over)" if 0 < mid(cell, "handed_over") < 1 else "")
                )
        yield line


def _best(others: list[Record], name: str) -> str:
    best = min(others, key=lambda cell: mid(cell, name))
    return f"{mid(best, name):,.0f} {best['policy']}"


def mid(cell: Record, name: str) -> float:
    return float(cell[name]["median"])

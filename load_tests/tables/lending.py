"""The records of lending: by load and link, under faults, and in a simulated network."""

from collections.abc import Iterable

from load_tests.records import Record


def rows(results: Record) -> Iterable[list[str]]:
    """Show one line per kind of load and site."""
    yield ["load", "first token p50, s", "p95, s", "gain p50 / p95", "lent", "measured / predicted"]
    for row in results["kinds"]:
        for site, title in (("slow", "borrower"), ("fast", "lender"), ("fast-2", "second lender")):
            if (found := row.get(site)) is None:
                continue
            alone, lending, overrun = found["alone_s"], found["lending_s"], row["measured_over_predicted"]
            yield [
                f"{row['name']}: {title}",
                f"{alone['p50']:.1f} → {lending['p50']:.1f}",
                f"{alone['p95']:.1f} → {lending['p95']:.1f}",
                f"{found['ratio_p50']:.2f} / {found['ratio_p95']:.2f}",
                f"{row['share_lent']:.0%}" if site == "slow" else "",
                f"{overrun['p50']:.2f}" if site == "slow" and overrun else "",
            ]


def map_rows(results: Record) -> Iterable[list[str]]:
    """Show one line per model and link.

    The times are medians of prompts that were lent and of those that were not, predicted → measured.
    """
    yield ["model, link", "lent", "there, s", "here, s", "gain p50 / p95"]
    for row in results["map"]:
        there, here = (
            "" if medians is None else f"{medians['predicted']:.1f} → {medians['measured']:.1f}"
            for medians in (row["lent_s"], row["here_s"])
        )
        gain = f"{row['slow']['ratio_p50']:.2f} / {row['slow']['ratio_p95']:.2f}"
        yield [row["name"], f"{row['share_lent']:.0%}", there, here, gain]


def fault_rows(results: Record) -> Iterable[list[str]]:
    """Show the cases and the errors of each fault."""
    yield ["fault", "cases", "answers with other tokens", "failed answers", "open work left"]
    for fault, count in results["by_fault"].items():
        of_fault = [row for row in results["rows"] if f"{row['how']}, {row['site']}" == fault]
        wrong = sum(len(row["margins"]) for row in of_fault)
        failed, left = sum(row["failed"] for row in of_fault), sum(bool(row["left_open"]) for row in of_fault)
        yield [fault.replace("slow", "borrower").replace("fast", "lender"), *map(str, (count, wrong, failed, left))]


def simulated_rows(results: Record) -> Iterable[list[str]]:
    """Show one line per load and arm: times until the first token, medians over the seeds."""
    yield ["load, requests go to", "KV blocks", "p50 / p95 / p99, s", "lent", "computed", "measured / predicted"]
    for cell in results["cells"]:
        overrun, outcomes = cell.get("measured_over_predicted"), cell.get("outcomes")
        yield [
            f"{cell['load']}, {cell['arm']}",
            cell["kv"],
            " / ".join(f"{cell[name]['median'] / 1000:.1f}" for name in ("p50_ms", "p95_ms", "p99_ms")),
            f"{cell['lent']['median']:.1%}" if outcomes else "",
            f"{outcomes['computed'] / outcomes['lent']:.0%}" if outcomes and outcomes["lent"] else "",
            f"{overrun['p50']:.2f}" if overrun else "",
        ]

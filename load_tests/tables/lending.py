"""The record of prompts that a fast site computes for a slow one, by kind of load and by link."""

from collections.abc import Iterable

from load_tests.records import Record


def rows(results: Record) -> Iterable[list[str]]:
    """Show one line per kind of load, of the borrowing and of the lending site, and one per link."""
    columns = ("first token p50, s", "p95, s", "gain p50 / p95", "lent", "measured / predicted")
    yield ["load, or link", *columns]
    for row in (*results["kinds"], *results["map"]):
        for site, title in (("slow", "borrower"), ("fast", "lender")):
            found, overrun = row.get(site), row["measured_over_predicted"]
            if found is None:
                continue
            alone, lending = found["alone_s"], found["lending_s"]
            is_borrower = site == "slow"
            yield [
                f"{row['name']}: {title}",
                f"{alone['p50']:.1f} → {lending['p50']:.1f}",
                f"{alone['p95']:.1f} → {lending['p95']:.1f}",
                f"{found['ratio_p50']:.2f} / {found['ratio_p95']:.2f}",
                f"{row['share_lent']:.0%}" if is_borrower else "",
                f"{overrun['p50']:.2f}" if is_borrower and overrun else "",
            ]

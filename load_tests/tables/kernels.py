"""The record of the kernels: cells of one measured call, for the terminal and for the page."""

from collections.abc import Iterable

from load_tests.records import Record

OURS = "pilotlight"


def rows(results: Record) -> Iterable[list[str]]:
    yield ["", "us", "predicted floor, us", "rate", "of floor", "target", "others, us"]
    for row in results["rows"]:
        name = f"{row['operation']}, {row['case']}"
        if "failure" in row:
            yield [name, row["failure"], "", "", "", "", ""]
            continue
        cells = [
            us(row),
            f"{row['predicted_us']:,.1f}",
            rate(row),
            f"{row['share_of_floor']:.0%}",
        ]
        yield [name, *cells, target(row), others(row)]


def us(row: Record) -> str:
    return f"{row['forms'][OURS]['us']:,.1f}"


def rate(row: Record) -> str:
    """Format the rate, in the unit of the resource that limits the call."""
    return f"{row['gb_per_s']:,.0f} GB/s" if row["bound"] == "memory" else f"{row['tflop_per_s']:,.1f} TFLOP/s"


def target(row: Record) -> str:
    wanted = row["target"]
    if wanted is None:
        return ""
    verdict = {True: "met", False: "missed", None: "no rival"}[row["met"]]
    if wanted["us"]:
        return f"{wanted['us']:g} us: {verdict}"
    reached = "" if row["share_reached"] is None else f"{row['share_reached']:.0%} of "
    return f"{reached}{wanted['share']:.0%} {wanted['of']}: {verdict}"


def others(row: Record) -> str:
    timed = [f"{form} {times['us']:,.1f}" for form, times in row["forms"].items() if form != OURS]
    return ", ".join([*timed, *(f"{form}: not here" for form in row["absent"])])

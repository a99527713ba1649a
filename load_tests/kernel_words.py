"""A measured call of an operation in words, the same in the terminal's table and in the README's."""

from typing import Any

OURS = "pilotlight"


def us(row: dict[str, Any]) -> str:
    return f"{row['forms'][OURS]['us']:,.1f}"


def rate(row: dict[str, Any]) -> str:
    """In the unit of what bounds it."""
    return f"{row['gb_per_s']:,.0f} GB/s" if row["bound"] == "memory" else f"{row['tflop_per_s']:,.1f} TFLOP/s"


def target(row: dict[str, Any]) -> str:
    wanted = row["target"]
    if wanted is None:
        return ""
    verdict = {True: "met", False: "missed", None: "no rival"}[row["met"]]
    if wanted["us"]:
        return f"{wanted['us']:g} us: {verdict}"
    reached = "" if row["share_reached"] is None else f"{row['share_reached']:.0%} of "
    return f"{reached}{wanted['share']:.0%} {wanted['of']}: {verdict}"


def others(row: dict[str, Any]) -> str:
    timed = [f"{form} {times['us']:,.1f}" for form, times in row["forms"].items() if form != OURS]
    return ", ".join([*timed, *(f"{form}: not here" for form in row["absent"])])

"""A few figures of several records, for the README; docs/measurements.md has them all."""

from collections.abc import Callable, Iterable
from typing import Any

from load_tests.records import Record
from load_tests.tables.engine import by_task
from load_tests.tables.kernels import OURS

Cells = tuple[str, str]  # our figure, and what it is to be compared with


def rows(records: dict[str, Record]) -> Iterable[list[str]]:
    """One row per figure whose record exists, with that record's date and commit."""
    yield ["", "Pilotlight", "beside", "measured"]
    for name, subject, cells in HEADLINES:
        if subject in records:
            record = records[subject]
            made = f"{record['date'][:10]}, {record['commit'][:7]}"
            yield [name, *cells(record["results"]), made]


def _start(results: Record) -> Cells:
    return f"{results['ready_s']['median']:.1f} s", f"target {results['targets']['ready_s']:g} s"


def _first_token(results: Record) -> Cells:
    return f"{results['ttft_ms']['median']:.1f} ms", ""


def _added_to_first_token(results: Record) -> Cells:
    return _routers(results, "1 stream", lambda row: float(row["added_first_p50_ms"]["median"]), "{:.2f} ms")


def _requests_per_s(results: Record) -> Cells:
    return _routers(results, "requests, 64 connections", lambda row: float(row["rate"]), "{:,.0f}")


def _routers(results: Record, task: str, figure: Callable[[Record], float], form: str) -> Cells:
    rows = {row["router"]: row for row in results["rows"] if row["task"] == task and row["router"] != "no router"}
    others = ", ".join(f"{name} {form.format(figure(row))}" for name, row in rows.items() if name != OURS)
    return form.format(figure(rows[OURS])), others


def _engines(task: str) -> Callable[[Record], Cells]:
    def cells(results: Record) -> Cells:
        speeds = by_task(results["rows"])[task]
        figures = {name: f"{row['tokens_per_s']['median']:,.0f}" for name, row in speeds.items()}
        return figures[OURS], ", ".join(f"{name} {figure}" for name, figure in figures.items() if name != OURS)

    return cells


def _cold_start(clock: str) -> Callable[[Record], Cells]:
    def cells(results: Record) -> Cells:
        size = results["sizes"]["0.6b"]
        found = {name: peer for name, peer in size["peers"].items() if clock == "b" and "ms" in peer}
        peers = ", ".join(f"{name} {_ms(peer)}" for name, peer in found.items())
        return _ms(size["clocks"][clock]), peers

    return cells


def _ms(measured: Record) -> str:
    return f"{measured['ms']['median']:,.0f} ms"


def _killed(results: Record) -> Cells:
    kill = results["kill"]
    return f"{kill['lost']} lost of {kill['streams']}, pause {kill['pause_ms']['p50']:,.0f} ms", ""


def _function(results: Record) -> Cells:
    name = next(name for name in results["cold_ms"] if name.startswith("plain"))
    return f"{results['cold_ms'][name]['p50']:.1f} ms", f"target {results['targets']['plain']:g} ms"


HEADLINES: list[tuple[str, str, Callable[[dict[str, Any]], Cells]]] = [
    ("`pilotlight up` to ready", "start-up", _start),
    ("first token through router and site", "start-up", _first_token),
    ("added by the router to a first token, p50", "router-overhead", _added_to_first_token),
    ("requests/s through the router, 64 connections", "router-overhead", _requests_per_s),
    ("prefill of 512 tokens, tokens/s", "engines", _engines("prefill, 512 tokens")),
    ("decode of 16 sequences, tokens/s", "engines", _engines("decode, batch 16")),
    ("0.6b model: nothing runs, to the first token", "cold-start", _cold_start("b")),
    ("0.6b model: sleeps, to the first token", "cold-start", _cold_start("c")),
    ("streams of a site that is killed", "site-death", _killed),
    ("a function's cold start, p50", "functions", _function),
]

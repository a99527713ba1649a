"""A few figures of several records, for README.md and docs/performance.md.

docs/measurements/ has all of them.
"""

import textwrap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from load_tests.records import Record, cpu_name
from load_tests.tables.engine import by_task
from load_tests.tables.kernels import OURS

Figures = tuple[str, str]  # ours, and those of others in the same run


HEADER = ["", "Pilotlight", "others, same run", "machine", "measured"]


class Headline(NamedTuple):
    """One row of the table of speeds."""

    name: str
    subject: str  # a record's subject
    figures: Callable[[dict[str, Any]], Figures]


def rows(records: dict[str, Record], names: tuple[str, ...]) -> Iterable[tuple[str, list[str]]]:
    """Yield the record's subject and a row for each of `names` whose record exists."""
    for headline in (HEADLINES[name] for name in names):
        if (record := records.get(headline.subject)) is not None:
            made = f"{record['date'][:10]}, {record['commit'][:7]}"
            figures = headline.figures(record["results"])
            yield headline.subject, [headline.name, *figures, _machine(record["machine"]), made]


def why(records: dict[str, Record]) -> str:
    """Return the README's reasons to use Pilotlight, as a list in Markdown.

    A reason has its figure if there is a record.
    """
    lost, cold = records.get("site-death"), records.get("functions")
    streams = f": {_killed(lost['results'])[0]}" if lost is not None else ""
    start = f" A function's first request takes {_function(cold['results'])[0]}." if cold is not None else ""
    adds = records.get("router-overhead")
    added = f", which adds {_added_to_first_token(adds['results'])[0]} to a first token" if adds is not None else ""
    lines = [
        "**A stream survives its site.** When a site is killed, frozen or drained, another one continues its streams with the "
        f"same tokens{streams}.",
        "**Functions run beside the models.** Code and manifests of Cloudflare's Python Workers run in the same site, with KV, "
        f"D1, R2, queues, Durable Objects and the site's models as bindings.{start}",
        "**One network instead of three systems.** The engine, an edge router with keys, quotas and a ledger"
        f"{added}, and the function host are one program with one configuration and one set of metrics.",
    ]
    return "".join(f"{textwrap.fill(line, 150, initial_indent='- ', subsequent_indent='  ')}\n" for line in lines)


def _machine(machine: dict[str, Any]) -> str:
    if machine["accelerator"]:
        return str(machine["accelerator"]).partition(",")[0].replace("NVIDIA ", "").partition(" HBM")[0]
    return f"{machine['cores']} cores, {cpu_name(machine)}"


def _start(results: Record) -> Figures:
    return f"{results['ready_s']['median']:.1f} s", ""


def _first_token(results: Record) -> Figures:
    return f"{results['ttft_ms']['median']:.1f} ms", ""


def _added_to_first_token(results: Record) -> Figures:
    return _routers(results, "1 stream", lambda row: float(row["added_first_p50_ms"]["median"]), "{:.2f} ms")


def _requests_per_s(results: Record) -> Figures:
    return _routers(results, "requests, 64 connections", lambda row: float(row["rate"]), "{:,.0f}")


def _routers(results: Record, task: str, figure: Callable[[Record], float], form: str) -> Figures:
    rows = {row["router"]: row for row in results["rows"] if row["task"] == task and row["router"] != "no router"}
    others = ", ".join(f"{name} {form.format(figure(row))}" for name, row in rows.items() if name != OURS)
    return form.format(figure(rows[OURS])), others


def _engines(task: str) -> Callable[[Record], Figures]:
    def figures(results: Record) -> Figures:
        speeds = by_task(results["rows"])[task]
        found = {name: f"{row['tokens_per_s']['median']:,.0f}" for name, row in speeds.items()}
        return found[OURS], ", ".join(f"{_name(name)} {figure}" for name, figure in found.items() if name != OURS)

    return figures


def _name(engine: str) -> str:
    return "vLLM" if engine == "vllm" else engine


def _decode_on_gpu(batch: int) -> Callable[[Record], Figures]:
    def figures(results: Record) -> Figures:
        row = next(row for row in results["decode"] if row["batch"] == batch)
        return f"{row['served']['tokens_per_s']:,.0f}", ""

    return figures


def _prefill_on_gpu(tokens: int) -> Callable[[Record], Figures]:
    def figures(results: Record) -> Figures:
        row = next(row for row in results["prefill"] if row["tokens"] == tokens)
        return f"{row['tokens_per_s']:,.0f}", ""

    return figures


def _wake_on_gpu(results: Record) -> Figures:
    row = next(row for row in results["rows"].values() if "again" in row)
    return f"{1e3 * row['again']['first_token_s']:,.0f} ms", ""


def _start_on_gpu(results: Record) -> Figures:
    return f"{results['rows']['b: nothing runs, in the page cache']['ms']:,.0f} ms", ""


def _cold_start(clock: str) -> Callable[[Record], Figures]:
    def figures(results: Record) -> Figures:
        size = results["sizes"]["0.6b"]
        found = {name: peer for name, peer in size["peers"].items() if clock == "b" and "ms" in peer}
        peers = ", ".join(f"{_name(name)} {_ms(peer)}" for name, peer in found.items())
        return _ms(size["clocks"][clock]), peers

    return figures


def _ms(measured: Record) -> str:
    return f"{measured['ms']['median']:,.0f} ms"


def _killed(results: Record) -> Figures:
    kill = results["kill"]
    return f"{kill['lost']} of {kill['streams']} lost, {kill['pause_ms']['p50']:,.0f} ms pause", ""


def _function(results: Record) -> Figures:
    name = next(name for name in results["cold_ms"] if name.startswith("plain"))
    return f"{results['cold_ms'][name]['p50']:.1f} ms", ""


HEADLINES: dict[str, Headline] = {
    "gpu-decode-1": Headline("8B model in bf16, one stream, tokens/s", "engine-8b", _decode_on_gpu(1)),
    "gpu-decode-256": Headline("8B model in bf16, 256 streams, tokens/s", "engine-8b", _decode_on_gpu(256)),
    "gpu-prefill": Headline("8B model in bf16, prompt of 8,192 tokens, tokens/s", "engine-8b", _prefill_on_gpu(8192)),
    "gpu-wake": Headline("8B model asleep in host memory, first token", "gpu-serving-8b", _wake_on_gpu),
    "gpu-start": Headline("8B model, nothing runs, first token", "gpu-serving-8b", _start_on_gpu),
    "cpu-decode-1": Headline("0.5B model, one stream, tokens/s", "engines", _engines("decode, batch 1")),
    "cpu-decode-16": Headline("0.5B model, 16 streams, tokens/s", "engines", _engines("decode, batch 16")),
    "cpu-prefill": Headline(
        "0.5B model, prompt of 4,096 tokens, tokens/s", "engines", _engines("prefill, 4,096 tokens")
    ),
    "cpu-start": Headline("0.6B model, nothing runs, first token", "cold-start", _cold_start("b")),
    "cpu-wake": Headline("0.6B model asleep in host memory, first token", "cold-start", _cold_start("c")),
    "router-first-token": Headline(
        "added by the router to a first token, median", "router-overhead", _added_to_first_token
    ),
    "router-requests": Headline("requests/s through the router, 64 connections", "router-overhead", _requests_per_s),
    "killed": Headline("streams of a site that is killed", "site-death", _killed),
    "function-start": Headline("a function's first request, median", "functions", _function),
    "up": Headline("`pilotlight up` until it answers", "start-up", _start),
}
README = (
    "gpu-decode-1", "gpu-decode-256", "gpu-wake", "cpu-decode-16", "cpu-prefill", "cpu-start", "router-first-token", "router-requests",
)  # fmt: skip
PERFORMANCE = tuple(HEADLINES)

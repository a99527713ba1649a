"""`make report`: the README's "Measured" section from the newest record of each subject, nothing by hand.

Knows how records are shown; refuses to know how they were made. A region of the README lies between two comments; what stands there is replaced. The
plot is written as SVG by hand: the same records give the same bytes, so that a test can tell when either is stale.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from load_tests import cold_words, functions_words, kernel_words, router_words, routing_words
from load_tests.bars import Group, draw
from load_tests.records import RESULTS

README = Path(__file__).parents[1] / "README.md"
PLOT = "shares.svg"
OURS = kernel_words.OURS
NOTHING = "Nothing has been measured yet.\n"
Record = dict[str, Any]


def main() -> None:
    records = newest(RESULTS)
    README.write_text(rewritten(README.read_text(encoding="utf-8"), records), encoding="utf-8")
    (RESULTS / PLOT).write_text(plot(records), encoding="utf-8")
    missing = sorted({RECORD_OF.get(region, region) for region in REGIONS} - records.keys() - {"plot"})
    print(
        f"{README.name} is redrawn from {len(records)} records"
        + (f"; no record of {', '.join(missing)}" if missing else "")
    )


def newest(folder: Path) -> dict[str, Record]:
    """By subject, the last that was made."""
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        subject = record["subject"]
        if subject not in records or record["date"] > records[subject]["date"]:
            records[subject] = record
    return records


def rewritten(text: str, records: dict[str, Record]) -> str:
    """The README with every region redrawn; a comment without its fellow is an error."""
    for region, render in REGIONS.items():
        begin, end = marks(region)
        subject = RECORD_OF.get(region, region)
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"{README.name} must have {begin.strip()} and behind it {end.strip()}, once each")
        head, rest = text.split(begin)
        body = plot_line(records) if subject == "plot" else NOTHING
        if subject in records:
            body = f"{heading(records[subject])}\n\n{table(render(records[subject]['results']))}"
        text = head + begin + body + end + rest.split(end)[1]
    return text


def marks(subject: str) -> tuple[str, str]:
    return f"<!-- measured: {subject} -->\n", f"<!-- end of {subject} -->\n"


def heading(record: Record) -> str:
    machine = record["machine"]
    if record["subject"] == "routing":
        kept = record["results"].get("others_kept_from")
        others = f" (the others' runs: commit {kept['commit']}; one cell of each was run again, alike)" if kept else ""
        return f"Simulated time, from its seeds alone; {record['date'][:10]}, commit {record['commit']}{others}:"
    where = machine["accelerator"] or f"{machine['cores']} cores of an {machine['processor']} processor, no GPU"
    torch = record["versions"].get("torch")
    return f"{where}; {record['date'][:10]}, commit {record['commit']}{f', torch {torch}' if torch else ''}:"


def table(rows: Iterable[list[str]]) -> str:
    """The first row is the header."""
    header, *rest = rows
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def start_up(results: Record) -> Iterable[list[str]]:
    names = {
        "ready_s": "`pilotlight up` to ready, s",
        "ttft_first_request_ms": "first token of the first request ever, ms",
        "ttft_ms": "first token of later requests, ms",
        "tpot_ms": "each further token, ms",
    }
    yield ["", "median", "range", "n", "target"]
    for key, name in names.items():
        target = results["targets"].get(key)
        yield [name, *spread(results[key]), "" if target is None else f"{target:g}"]


def engines(results: Record) -> Iterable[list[str]]:
    names = list(results["peak_rss_bytes"])
    yield ["tokens/s, share of ceiling", *names, f"{OURS} / best other"]
    for task, speeds in by_task(results["rows"]).items():
        cells = [
            f"{speeds[name]['tokens_per_s']['median']:,.0f}, {speeds[name]['share_of_ceiling']:.0%}"
            if name in speeds
            else "-"
            for name in names
        ]
        others = [row["tokens_per_s"]["median"] for name, row in speeds.items() if name != OURS]
        compared = f"{speeds[OURS]['tokens_per_s']['median'] / max(others):.2f}" if others and OURS in speeds else "-"
        yield [task, *cells, compared]
    yield ["peak memory, GB", *(f"{results['peak_rss_bytes'][name] / 1e9:.2f}" for name in names), ""]


def by_task(rows: list[Record]) -> dict[str, dict[str, Record]]:
    tasks: dict[str, dict[str, Record]] = {}
    for row in rows:
        is_prefill = row["measure"] == "prefill"
        task = f"prefill, {row['prompt_tokens']:,} tokens" if is_prefill else f"decode, batch {row['batch']}"
        tasks.setdefault(task, {})[row["engine"]] = row
    return tasks


def step_cost(results: Record) -> Iterable[list[str]]:
    targets = results["targets"]
    yield [f"{results['shape']} shape, batch {results['batch']}", "median", "range", "n", "target"]
    for name, values in results["phases_ms"].items():
        target = f"{targets[name]:g}" if name in targets else ""
        yield [f"{name}, ms" if name == "step" else f"host: {name}, ms", *spread(values), target]
    share = results["prefix_cache"]["share_of_steps"]
    span = f"{share['min']:.3%} to {share['max']:.3%}"
    yield [
        "prefix cache without a hit, of the step",
        f"{share['median']:.3%}",
        span,
        str(share["n"]),
        f"{targets['prefix_cache']:.0%}",
    ]
    tags = results["generation_tags"]
    yield ["generation tags, of the step", f"{tags['share_of_step']:.3%}", "", "", f"{targets['generation_tags']:.0%}"]


def spread(values: Record) -> list[str]:
    return [f"{values['median']:g}", f"{values['min']:g} to {values['max']:g}", str(values["n"])]


def engine(results: Record) -> Iterable[list[str]]:
    yield [
        f"{results['shape']} shape, {results['dtype']}",
        "ms",
        "tokens/s",
        "of bandwidth or matmul rate",
        "ms without graphs",
        "kernels",
    ]
    for row in results["decode"]:
        without = [f"{row['step_ms_without_graphs']:.2f}", str(row["kernels"])] if "kernels" in row else ["", ""]
        yield [
            f"decode, batch {row['batch']}", f"{row['step_ms']:.2f}", f"{row['tokens_per_s']:,.0f}", f"{row['share_of_bandwidth']:.0%}", *without
        ]  # fmt: skip
    for row in results["prefill"]:
        yield [
            f"prefill, {row['tokens']:,} tokens",
            f"{row['step_ms']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['mfu']:.0%}",
            "",
            "",
        ]


def kernels(results: Record) -> Iterable[list[str]]:
    yield ["", "us", "predicted floor, us", "rate", "of floor", "target", "others, us"]
    for row in results["rows"]:
        name = f"{row['operation']}, {row['case']}"
        if "failure" in row:
            yield [name, row["failure"], "", "", "", "", ""]
            continue
        words = [
            kernel_words.us(row),
            f"{row['predicted_us']:,.1f}",
            kernel_words.rate(row),
            f"{row['share_of_floor']:.0%}",
        ]
        yield [name, *words, kernel_words.target(row), kernel_words.others(row)]


def plot_line(records: dict[str, Record]) -> str:
    return (
        f"![Shares of what the machine can do]({RESULTS.parent.name}/{RESULTS.name}/{PLOT})\n"
        if groups(records)
        else ""
    )


def plot(records: dict[str, Record]) -> str:
    return draw("Share of what the machine can do, measured in the same run", groups(records))


def groups(records: dict[str, Record]) -> list[Group]:
    """Engines by task, then kernels by call."""
    found = []
    if "engines" in records:
        for task, speeds in by_task(records["engines"]["results"]["rows"]).items():
            found.append(Group(task, {name: row["share_of_ceiling"] for name, row in speeds.items()}))
    for row in records["kernels"]["results"]["rows"] if "kernels" in records else ():
        if "failure" not in row:
            floor = row["predicted_us"]
            shares = {name: floor / times["us"] for name, times in row["forms"].items()}
            found.append(Group(f"{row['operation']}, {row['case']}", shares))
    return found


REGIONS: dict[str, Callable[[Record], Iterable[list[str]]]] = {
    "start-up": start_up,
    "engines": engines,
    "plot": lambda results: (),
    "step-cost": step_cost,
    "routing": routing_words.rows,
    "router-overhead": router_words.overhead,
    "site-death": router_words.site_death,
    "soak": router_words.soak,
    "cold-start": cold_words.clocks,
    "overcommit": cold_words.overcommit,
    "functions": functions_words.speeds,
    "neighbours": functions_words.neighbours,
    "engine-8b": engine,
    "kernels": kernels,
}

RECORD_OF = {"neighbours": "functions"}  # regions that show a part of another one's record

if __name__ == "__main__":
    main()

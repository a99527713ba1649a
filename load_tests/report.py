"""`make report`: write the tables of README.md and docs/ from the newest record of each subject.

Refuses a record of a tree with uncommitted changes or of a commit that the history does not have; marks one that is older than the code it measures.

This module places tables into pages; load_tests/tables/ makes them from records. A region of a page is the text between two comments; it is replaced.
The plot is SVG without a library: the same records give the same bytes, so that a test can find stale pages and plots.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from load_tests.bars import Group, draw
from load_tests.records import FORCED, RESULTS, Record, cpu_kind, cpu_name, doubt, has_changed_since, history
from load_tests.tables import (
    clients,
    cold_start,
    engine,
    failures,
    functions,
    gpu_serving,
    headlines,
    kernels,
    lossless,
    page,
    plan,
    prefill_decode,
    request_path,
    router,
    routing,
    shipping,
    speculation,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PERFORMANCE = ROOT / "docs" / "performance.md"
MEASUREMENTS = ROOT / "docs" / "measurements"
CLIENTS = ROOT / "docs" / "clients.md"
FIRST_MINUTE = ROOT / "docs" / "first-minute.md"
PAGE = ROOT / "docs" / "page.md"
PLOT = "shares.svg"
DRAFTS_PLOT = "drafts.svg"
NOTHING = "Nothing has been measured yet.\n"
STALE = " †"  # follows a commit if the code has changed since
OLDER = "Measured at earlier commits; the code has changed since:"
ENGINE, ROUTER, SITE = ("engine", "kernels"), ("edge_router", "wire"), ("runtime", "engine", "wire")


class Region(NamedTuple):
    """A table of one record."""

    rows: Callable[[Record], Iterable[list[str]]]  # rows of a record's results, the header first
    code: tuple[str, ...]  # folders of the measured code
    subject: str | None = None  # the record's subject, if it is not the region's name
    is_simulated: bool = False  # the figures follow from seeds, not from the machine
    is_per_cpu: bool = False  # one table for each kind of CPU, the newest first


REGIONS: dict[str, Region] = {
    "start-up": Region(engine.start_up, SITE),
    "engines": Region(engine.engines, ENGINE, is_per_cpu=True),
    "gguf-speed": Region(engine.gguf_speed, ENGINE, is_per_cpu=True),
    "gguf-agreement": Region(engine.gguf_agreement, ENGINE),
    "gguf-calls": Region(engine.gguf_calls, ("engine", "kernels", "dialects")),
    "states": Region(engine.states, ENGINE),
    "states-at-length": Region(engine.states_at_length, ENGINE, "states"),
    "step-cost": Region(engine.step_cost, ENGINE),
    "lossless": Region(lossless.in_memory, ENGINE),
    "lossless-disk": Region(lossless.on_disk, ENGINE),
    "lossless-starts": Region(lossless.starts, ENGINE),
    "prefill-decode": Region(prefill_decode.ways, ENGINE),
    "routing": Region(routing.rows, ("edge_router/routing",), is_simulated=True),
    "routing-worst": Region(routing.worst_rows, ("edge_router/routing",), "routing", is_simulated=True),
    "routing-heavy": Region(
        partial(routing.policy_rows, load="heavy"), ("edge_router/routing",), "routing", is_simulated=True
    ),
    "routing-moderate": Region(
        partial(routing.policy_rows, load="moderate"), ("edge_router/routing",), "routing", is_simulated=True
    ),
    "routing-troubles": Region(routing.trouble_rows, ("edge_router/routing",), "routing", is_simulated=True),
    "routing-pools": Region(routing.pool_rows, ("edge_router/routing",), "routing", is_simulated=True),
    "routing-scale": Region(routing.scale_rows, ("edge_router/routing",), "routing"),
    "routing-table": Region(routing.table_rows, ("edge_router/routing",), "routing"),
    "router-overhead": Region(router.overhead, ROUTER),
    "router-features": Region(router.features, ROUTER, "router-overhead"),
    "metered": Region(router.overhead, ROUTER),
    "account-timing": Region(router.account_timing, SITE),
    "http-servers": Region(router.http_servers, ("wire",)),
    "request-path": Region(request_path.rows, ("edge_router", *SITE)),
    "site-death": Region(router.site_death, ("edge_router", *SITE)),
    "faults": Region(router.faults, ("edge_router", *SITE)),
    "attacks": Region(router.attacks, ("edge_router", *SITE)),
    "soak": Region(router.soak, ("edge_router", *SITE)),
    "cascade": Region(failures.cascade, ("edge_router", *SITE)),
    "abort-storm": Region(failures.abort_storm, ("edge_router", *SITE)),
    "maintenance": Region(shipping.maintenance, ("edge_router", *SITE)),
    "backup": Region(shipping.backup, ("runtime/cli", "functions/bindings", "edge_router/metering")),
    "bare-machine": Region(shipping.bare_machines, ("deploy", "runtime/cli")),
    "cold-start": Region(cold_start.clocks, SITE),
    "overcommit": Region(cold_start.overcommit, SITE),
    "functions": Region(functions.speeds, ("functions", "wire")),
    "neighbours": Region(functions.neighbours, ("functions", "wire"), "functions"),
    "engine-8b": Region(engine.engine_on_gpu, ENGINE),
    "plan": Region(plan.predictions, ENGINE, "engine-8b"),
    "gpu-serving-8b": Region(gpu_serving.rows, ENGINE),
    "kernels-changed": Region(kernels.rows, ("kernels",)),
    "kernels-packed": Region(kernels.rows, ("kernels",)),
    "kernels": Region(kernels.rows, ("kernels",)),
    "speculation": Region(speculation.workloads, ENGINE),
    "speculation-steps": Region(speculation.steps, ENGINE, "speculation"),
}
CLIENT_REGIONS: dict[str, Region] = {
    "client-libraries": Region(clients.libraries, ("dialects", "runtime/api", "edge_router"), "clients"),
    "ollama-clients": Region(clients.ollama, ("dialects", "runtime/api", "edge_router"), "further-clients"),
    "decision-clients": Region(clients.deciders, ("dialects", "runtime/api", "edge_router"), "further-clients"),
    "coding-agents": Region(clients.edits, ("dialects", "runtime/api", "edge_router")),
    "coding-agents-model": Region(clients.edits, ("dialects", "runtime", "engine")),
    "rerankers": Region(clients.rerankers, ("dialects", "runtime/api", "edge_router")),
    "load-generators": Region(clients.generators, ("dialects", "runtime/api", "edge_router"), "clients"),
}
FIRST_MINUTE_REGIONS: dict[str, Region] = {"first-minute": Region(page.first_minute, ("page", "runtime"))}
PAGE_REGIONS: dict[str, Region] = {
    "operate": Region(page.operate, ("page", "runtime")),
    "page": Region(page.cost, ("page",)),
}


# The regions of each page of docs/measurements/.
MEASURED_PAGES: dict[str, tuple[str, ...]] = {
    "start": ("start-up", "bare-machine"),
    "engine-cpu": (
        "engines",
        "gguf-speed",
        "gguf-agreement",
        "gguf-calls",
        "states",
        "states-at-length",
        "plot",
        "step-cost",
        "lossless",
        "lossless-disk",
        "lossless-starts",
    ),
    "prefill-decode": ("prefill-decode",),
    "speculation": ("speculation", "drafts-plot", "speculation-steps"),
    "routing": tuple(name for name in REGIONS if name.startswith("routing")),
    "router": ("router-overhead", "router-features", "metered", "account-timing", "http-servers", "request-path"),
    "failures": (
        "site-death",
        "cascade",
        "faults",
        "attacks",
        "abort-storm",
        "soak",
        "maintenance",
        "backup",
    ),
    "cold-starts": ("cold-start", "overcommit"),
    "functions": ("functions", "neighbours"),
    "gpu": ("engine-8b", "plan", "gpu-serving-8b", "kernels-packed", "kernels-changed", "kernels"),
}


def main() -> None:
    records = newest(RESULTS)
    for path, regions in PAGES.items():
        path.write_text(redrawn(path.read_text(encoding="utf-8"), regions(records)), encoding="utf-8")
    shown = trusted(records)
    (RESULTS / PLOT).write_text(plot(shown), encoding="utf-8")
    if "speculation" in shown:
        drawn_rates = speculation.rates(shown["speculation"]["results"])
        (RESULTS / DRAFTS_PLOT).write_text(drawn_rates, encoding="utf-8")
    regions_of_all = {**REGIONS, **CLIENT_REGIONS, **FIRST_MINUTE_REGIONS, **PAGE_REGIONS}
    missing = sorted({region.subject or name for name, region in regions_of_all.items()} - records.keys())
    print(f"{len(PAGES)} pages are drawn from {len(shown)} records.")
    if missing:
        print(f"No record of {', '.join(missing)}.")
    for subject, record in sorted(records.items()):
        if subject not in shown:
            print(f"Refused, {doubt(record, history())}: {subject}, {record['date'][:10]}, {record['commit']}.")


def newest(folder: Path) -> dict[str, Record]:
    """Read the newest trustworthy record of each subject, or the newest one if none is trustworthy.

    A record has under "others" the newest ones of its subject from other kinds of CPU.
    """
    kinds: dict[str, dict[str, Record]] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        of_subject = kinds.setdefault(record["subject"], {})
        known = of_subject.get(kind := cpu_kind(record["machine"]))
        if known is None or _rank(record) > _rank(known):
            of_subject[kind] = record
    records = {}
    for subject, of_subject in kinds.items():
        first, *others = sorted(of_subject.values(), key=_rank, reverse=True)
        records[subject] = {**first, "others": others}
    return records


def _rank(record: Record) -> tuple[bool, bool, str]:
    return doubt(record, history()) is None, FORCED not in record["machine"], record["date"]


def trusted(records: dict[str, Record]) -> dict[str, Record]:
    """Return the records whose tree can be checked out."""
    return {subject: record for subject, record in records.items() if doubt(record, history()) is None}


def headline_regions(records: dict[str, Record], names: tuple[str, ...]) -> dict[str, str]:
    """Return the tables of headlines: figures of the present code, then figures older than their code."""
    current, older = list[list[str]](), list[list[str]]()
    for subject, row in headlines.rows(trusted(records), names):
        (older if _is_stale(subject, records[subject]) else current).append(row)
    body = table([headlines.HEADER, *current]) if current else "" if older else NOTHING
    if older:
        body += "\n" * bool(current) + f"{OLDER}\n\n" + table([headlines.HEADER, *older])
    return {"headlines": body}


def readme_regions(records: dict[str, Record]) -> dict[str, str]:
    return {**headline_regions(records, headlines.README), "why": headlines.why(trusted(records))}


def _is_stale(subject: str, record: Record) -> bool:
    region = REGIONS.get(subject)
    return region is not None and has_changed_since(record["commit"], region.code)


def measurements_regions(records: dict[str, Record]) -> dict[str, str]:
    shown = trusted(records)
    folder = f"../../{RESULTS.relative_to(ROOT).as_posix()}"
    image = f"![Shares of what the machine can do]({folder}/{PLOT})\n"
    drafts = f"![Drafts that were right]({folder}/{DRAFTS_PLOT})\n"
    plots = {"plot": image if groups(shown) else "", "drafts-plot": drafts if "speculation" in shown else ""}
    return {**drawn(REGIONS, records), **plots}


def measured_page(name: str, records: dict[str, Record]) -> dict[str, str]:
    """Return the regions of one page of docs/measurements/."""
    regions = measurements_regions(records)
    return {region: regions[region] for region in MEASURED_PAGES[name]}


def drawn(regions: dict[str, Region], records: dict[str, Record]) -> dict[str, str]:
    """Return each region's heading and table, or why its record is not shown."""
    texts = {}
    for name, region in regions.items():
        record = records.get(region.subject or name)
        if record is None:
            texts[name] = NOTHING
        elif (why := doubt(record, history())) is not None:
            texts[name] = f"Not shown: the newest record ({record['date'][:10]}, {record['commit']}) was {why}.\n"
        else:
            shown = [
                record,
                *(
                    (one for one in record.get("others", ()) if doubt(one, history()) is None)
                    if region.is_per_cpu
                    else ()
                ),
            ]
            texts[name] = "\n".join(f"{heading(one, region)}\n\n{table(region.rows(one['results']))}" for one in shown)
    return texts


PAGES: dict[Path, Callable[[dict[str, Record]], dict[str, str]]] = {
    README: readme_regions,
    PERFORMANCE: partial(headline_regions, names=headlines.PERFORMANCE),
    **{MEASUREMENTS / f"{name}.md": partial(measured_page, name) for name in MEASURED_PAGES},
    CLIENTS: partial(drawn, CLIENT_REGIONS),
    FIRST_MINUTE: partial(drawn, FIRST_MINUTE_REGIONS),
    PAGE: partial(drawn, PAGE_REGIONS),
}


def undated(text: str) -> list[str]:
    """Return a page's distinct lines, sorted, without the marks of records that are older than their code."""
    return sorted({line.replace(STALE, "") for line in text.splitlines()} - {OLDER})


def redrawn(text: str, regions: dict[str, str]) -> str:
    """Return a page with every region replaced.

    Raises ValueError for a comment that is missing, duplicated or without its counterpart.
    """
    for region, body in regions.items():
        begin, end = marks(region)
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"the page must have {begin.strip()} and then {end.strip()}, once each")
        head, rest = text.split(begin)
        text = head + begin + body + end + rest.split(end)[1]
    return text


def marks(region: str) -> tuple[str, str]:
    return f"<!-- measured: {region} -->\n", f"<!-- end of {region} -->\n"


def heading(
    record: Record, region: Region, has_changed: Callable[[str, tuple[str, ...]], bool] = has_changed_since
) -> str:
    machine, made = record["machine"], f"{record['date'][:10]}, commit {record['commit']}"
    made += STALE if has_changed(record["commit"], region.code) else ""
    if region.is_simulated:
        return f"Simulated time, from its seeds alone; {made}:"
    where = machine["accelerator"] or f"{machine['cores']} cores, {cpu_name(machine)}, no GPU"
    torch = record["versions"].get("torch")
    return f"{where}; {made}{f', torch {torch}' if torch else ''}:"


def table(rows: Iterable[list[str]]) -> str:
    """Format rows, the header first, as Markdown."""
    header, *rest = rows
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rest]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plot(records: dict[str, Record]) -> str:
    return draw("Share of what the machine can do, measured in the same run", groups(records))


def groups(records: dict[str, Record]) -> list[Group]:
    """Return the plot's bars: engines by task, then kernels by call."""
    found = []
    if "engines" in records:
        for task, speeds in engine.by_task(records["engines"]["results"]["rows"]).items():
            found.append(Group(task, {name: row["share_of_ceiling"] for name, row in speeds.items()}))
    for row in records["kernels"]["results"]["rows"] if "kernels" in records else ():
        if "failure" not in row:
            floor = row["predicted_us"]
            shares = {name: floor / times["us"] for name, times in row["forms"].items()}
            found.append(Group(f"{row['operation']}, {row['case']}", shares))
    return found


if __name__ == "__main__":
    main()

"""`make report`: the tables of README.md and docs/measurements.md from the newest record of each subject, nothing by hand.

Knows the pages; refuses to know how records were made, or what their figures mean (tables/). A region of a page lies between two comments; its text
is replaced. The plot is written as SVG by hand: the same records give the same bytes, so that a test can tell when either is stale.
"""

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from load_tests.bars import Group, draw
from load_tests.records import RESULTS, Record
from load_tests.tables import (
    clients,
    cold_start,
    engine,
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
    speculation,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
MEASUREMENTS = ROOT / "docs" / "measurements.md"
CLIENTS = ROOT / "docs" / "clients.md"
FIRST_MINUTE = ROOT / "docs" / "first-minute.md"
PLOT = "shares.svg"
DRAFTS_PLOT = "drafts.svg"
NOTHING = "Nothing has been measured yet.\n"


class Region(NamedTuple):
    """A table of one record."""

    rows: Callable[[Record], Iterable[list[str]]]  # of a record's results, the header first
    subject: str | None = None  # of the record, where it is not the region's name
    is_simulated: bool = False  # what it shows follows from seeds and not from the machine


REGIONS: dict[str, Region] = {
    "start-up": Region(engine.start_up),
    "engines": Region(engine.engines),
    "engines-amx": Region(engine.engines),
    "step-cost": Region(engine.step_cost),
    "lossless": Region(lossless.in_memory),
    "lossless-disk": Region(lossless.on_disk),
    "lossless-starts": Region(lossless.starts),
    "prefill-decode": Region(prefill_decode.ways),
    "routing": Region(routing.rows, is_simulated=True),
    "routing-worst": Region(routing.worst_rows, "routing", is_simulated=True),
    "routing-heavy": Region(partial(routing.policy_rows, load="heavy"), "routing", is_simulated=True),
    "routing-moderate": Region(partial(routing.policy_rows, load="moderate"), "routing", is_simulated=True),
    "routing-paired": Region(routing.paired_rows, is_simulated=True),
    "routing-paired-all": Region(partial(routing.policy_rows, load="moderate"), "routing-paired", is_simulated=True),
    "routing-troubles": Region(routing.trouble_rows, "routing", is_simulated=True),
    "routing-pools": Region(routing.pool_rows, "routing", is_simulated=True),
    "routing-scale": Region(routing.scale_rows, "routing"),
    "routing-table": Region(routing.table_rows, "routing"),
    "router-overhead": Region(router.overhead),
    "metered": Region(router.overhead),
    "account-timing": Region(router.account_timing),
    "http-servers": Region(router.http_servers),
    "request-path": Region(request_path.rows),
    "site-death": Region(router.site_death),
    "faults": Region(router.faults),
    "attacks": Region(router.attacks),
    "soak": Region(router.soak),
    "cold-start": Region(cold_start.clocks),
    "overcommit": Region(cold_start.overcommit),
    "functions": Region(functions.speeds),
    "neighbours": Region(functions.neighbours, "functions"),
    "engine-8b": Region(engine.engine_on_gpu),
    "plan": Region(plan.predictions, "engine-8b"),
    "gpu-serving-8b": Region(gpu_serving.rows),
    "kernels-changed": Region(kernels.rows),
    "kernels-packed": Region(kernels.rows),
    "kernels": Region(kernels.rows),
    "speculation": Region(speculation.workloads),
    "speculation-steps": Region(speculation.steps, "speculation"),
}
CLIENT_REGIONS: dict[str, Region] = {
    "client-libraries": Region(clients.libraries, "clients"),
    "agents": Region(clients.agents),
    "ollama-clients": Region(clients.ollama, "further-clients"),
    "decision-clients": Region(clients.deciders, "further-clients"),
    "coding-agents": Region(clients.edits),
    "load-generators": Region(clients.generators, "clients"),
}
FIRST_MINUTE_REGIONS: dict[str, Region] = {"first-minute": Region(page.first_minute)}


def main() -> None:
    records = newest(RESULTS)
    for path, regions in PAGES.items():
        path.write_text(redrawn(path.read_text(encoding="utf-8"), regions(records)), encoding="utf-8")
    (RESULTS / PLOT).write_text(plot(records), encoding="utf-8")
    if "speculation" in records:
        drawn_rates = speculation.rates(records["speculation"]["results"])
        (RESULTS / DRAFTS_PLOT).write_text(drawn_rates, encoding="utf-8")
    missing = sorted(
        {region.subject or name for name, region in {**REGIONS, **CLIENT_REGIONS, **FIRST_MINUTE_REGIONS}.items()}
        - records.keys()
    )
    pages = " and ".join(str(path.relative_to(ROOT)) for path in PAGES)
    print(
        f"{pages} are redrawn from {len(records)} records" + (f"; no record of {', '.join(missing)}" if missing else "")
    )


def newest(folder: Path) -> dict[str, Record]:
    """Read the last record of each subject."""
    records: dict[str, Record] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        subject = record["subject"]
        if subject not in records or record["date"] > records[subject]["date"]:
            records[subject] = record
    return records


def readme_regions(records: dict[str, Record]) -> dict[str, str]:
    return {"headlines": table(headlines.rows(records)) if records else NOTHING}


def measurements_regions(records: dict[str, Record]) -> dict[str, str]:
    image = f"![Shares of what the machine can do](../{RESULTS.relative_to(ROOT).as_posix()}/{PLOT})\n"
    drafts = f"![Drafts that were right](../{RESULTS.relative_to(ROOT).as_posix()}/{DRAFTS_PLOT})\n"
    plots = {"plot": image if groups(records) else "", "drafts-plot": drafts if "speculation" in records else ""}
    return {**drawn(REGIONS, records), **plots}


def clients_regions(records: dict[str, Record]) -> dict[str, str]:
    return drawn(CLIENT_REGIONS, records)


def first_minute_regions(records: dict[str, Record]) -> dict[str, str]:
    return drawn(FIRST_MINUTE_REGIONS, records)


def drawn(regions: dict[str, Region], records: dict[str, Record]) -> dict[str, str]:
    """Return each region's heading and table."""
    texts = {}
    for name, region in regions.items():
        record = records.get(region.subject or name)
        texts[name] = (
            f"{heading(record, region.is_simulated)}\n\n{table(region.rows(record['results']))}" if record else NOTHING
        )
    return texts


PAGES: dict[Path, Callable[[dict[str, Record]], dict[str, str]]] = {
    README: readme_regions,
    MEASUREMENTS: measurements_regions,
    CLIENTS: clients_regions,
    FIRST_MINUTE: first_minute_regions,
}


def redrawn(text: str, regions: dict[str, str]) -> str:
    """Return a page with every region replaced. Raises ValueError for a comment that is missing, twice there or without its fellow."""
    for region, body in regions.items():
        begin, end = marks(region)
        if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
            raise ValueError(f"the page must have {begin.strip()} and behind it {end.strip()}, once each")
        head, rest = text.split(begin)
        text = head + begin + body + end + rest.split(end)[1]
    return text


def marks(region: str) -> tuple[str, str]:
    return f"<!-- measured: {region} -->\n", f"<!-- end of {region} -->\n"


def heading(record: Record, is_simulated: bool = False) -> str:
    machine = record["machine"]
    if is_simulated:
        return f"Simulated time, from its seeds alone; {record['date'][:10]}, commit {record['commit']}:"
    where = machine["accelerator"] or f"{machine['cores']} cores of an {machine['processor']} processor, no GPU"
    torch = record["versions"].get("torch")
    return f"{where}; {record['date'][:10]}, commit {record['commit']}{f', torch {torch}' if torch else ''}:"


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

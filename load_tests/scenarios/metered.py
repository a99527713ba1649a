"""The cost of serving paying clients. `make bench-metered` runs it.

python -m load_tests.scenarios.metered

A router in front of a site that computes nothing requires keys, enforces every kind of account limit, records tokens in a ledger before it sends
them, and reserves and settles a daily quota. It is compared with the same router with limits shared through PostgreSQL, the router without these
features, and LiteLLM's proxy (`make peers`). Figures are the additional time over direct requests to the site. Target: 1.5 ms at the median with 1
request and with 64 streams at a time. Afterwards the ledger must have a record of each answer.
"""

import argparse
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console

from load_tests.overhead.routers import KEY, METERED, OURS, SHARED, Running, running
from load_tests.postgres import running_postgres
from load_tests.records import write_record
from load_tests.scenarios.router_overhead import TASKS, Round, measure, row, show
from pilotlight.wire.http.listen import raise_file_limit

TARGET_MS = 1.5
NAMES = ("1 stream", "64 streams", "256 streams", "requests, 1 connection", "requests, 64 connections")
# Times that a client notices: of a whole answer that is not streamed, of a stream's first token, and of each token.
TIMES = {"requests": ("whole",), "stream": ("first", "token")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of one measurement")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    raise_file_limit()
    console, tasks = Console(width=150), [task for task in TASKS if task.name in NAMES]
    with ExitStack() as stack:
        names, quotas = [METERED, OURS, "litellm"], ""
        try:
            quotas = stack.enter_context(running_postgres()).url
            names.insert(1, SHARED)
        except FileNotFoundError as error:
            console.print(f"{SHARED} is left out: {error}")
        routers = stack.enter_context(running(names, options.peers.absolute(), quotas))
        versions = {router.name: router.version for router in routers if router.version}
        rounds = uvloop.run(measure(routers, tasks, options.rounds, options.seconds, console))
        ledger = {router.name: in_ledger(router) for router in routers if router.name in (METERED, SHARED)}
    rows = [row(task, name, rounds) for task in tasks for name in rounds[0][task.name]]
    results: dict[str, Any] = {
        "rounds": options.rounds,
        "seconds": options.seconds,
        "versions": versions,
        "shared_cores": "client, site and router share the machine's cores",
        "target_ms": TARGET_MS,
        "added_p50_ms": added(rows),
        "in_ledger": {name: {"answers": answered(name, rounds), "records": ledger[name]} for name in ledger},
        "beside_idle_streams": None,
        "rows": rows,
    }
    show(console, results)
    console.print_json(data={name: results[name] for name in ("added_p50_ms", "in_ledger")})
    if not options.no_record:
        path = write_record("metered", results, ("aiohttp", "httptools", "orjson", "uvloop", "psycopg"))
        console.print(f"Record: {path}", soft_wrap=True)
    for name, counts in results["in_ledger"].items():
        if counts["records"] < counts["answers"]:
            raise SystemExit(f"{name}: {counts['answers']} answers and {counts['records']} records")


def added(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the time that each router adds at the median, by task and kind of time."""
    found: dict[str, dict[str, float]] = {}
    for line in rows:
        for kind in next(kinds for word, kinds in TIMES.items() if word in line["task"]):
            if (figure := line.get(f"added_{kind}_p50_ms")) is not None:
                found.setdefault(f"{line['task']}, {kind}", {})[line["router"]] = figure["median"]
    return found


def in_ledger(router: Running) -> int:
    """Return the number of ledger records after all ended requests are written."""
    asked = urllib.request.Request(f"{router.url}/usage?by=account", headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        return sum(each["requests"] for each in orjson.loads(answer.read())["usage"])


def answered(name: str, rounds: list[Round]) -> int:
    return round(sum(made[task][name]["answers"] for made in rounds for task in made))


if __name__ == "__main__":
    main()

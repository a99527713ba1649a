"""Do routers enforce an account's limits together? `make bench-shared-quotas` runs it.

python -m load_tests.scenarios.shared_quotas

Three routers share a PostgreSQL, in front of a site that computes nothing; clients send requests to all of them as fast as they are admitted, and
retry 10 ms after a refusal. The admitted requests per minute, open requests and tokens per day must not exceed the limit. They may stay below it by
the unused lease of each router, not more. Then the database is killed: each router continues with the account's full limit. When the database is
back, usage during the outage counts.
"""

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psycopg
from rich.console import Console

from load_tests.overhead.routers import KEY, Running, our_router, trivial_site
from load_tests.overhead.trivial_site import MODEL
from load_tests.postgres import Postgres, running_postgres
from load_tests.records import write_record
from pilotlight.edge_router.admission.quotas.shared import LEASE_SHARE

NUM_ROUTERS = 3
CLIENTS = 8  # clients of an account at each router
PER_MIN, OPEN, PER_DAY = 960, 24, 2_000
LIMITS = {
    "minute": f"requests_per_min = {PER_MIN}",
    "open": f"max_open = {OPEN}",
    "day": f"tokens_per_day = {PER_DAY}",
    "away": f"requests_per_min = {PER_MIN}",
}
STREAM_TOKENS = 25  # tokens of a stream, which take half a second
PAUSE_S = 0.01  # pause after a refusal
SETTLED_S = 10.0
ENOUGH = (
    2 * NUM_ROUTERS * CLIENTS
)  # refusals after which clients have certainly requested more than the limit; on a busy machine that takes longer
LONGEST_S = 60.0


@dataclass
class Given:
    """Counts of an account's requests, by outcome."""

    answers: list[int] = field(default_factory=lambda: [0] * NUM_ROUTERS)  # by router
    refusals: int = 0
    failures: dict[int, int] = field(default_factory=dict)  # by status
    open: int = 0
    most_open: int = 0


def measure(seconds: float) -> dict[str, Any]:
    """Measure all limits. Raises FileNotFoundError if PostgreSQL is not installed."""
    with ExitStack() as stack:
        database = stack.enter_context(running_postgres())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pilotlight-quotas-")))
        site = stack.enter_context(trivial_site(folder))
        routers = [
            stack.enter_context(our_router(f"router {i}", folder, site.url, tables(folder / f"ledger-{i}", database)))
            for i in range(NUM_ROUTERS)
        ]
        return asyncio.run(abuse(routers, database, seconds))


def tables(ledger: Path, database: Postgres) -> str:
    keys = {"load": KEY} | {name: _key(name) for name in LIMITS}
    text = "require_key = true\n"
    for name, key in keys.items():
        digest = hashlib.sha256(key.encode()).hexdigest()
        text += f'[[accounts]]\nname = "{name}"\n{LIMITS.get(name, "")}\n'
        text += f'[[keys]]\nname = "{name}"\naccount = "{name}"\nkey_sha256 = "{digest}"\n'
    return f'{text}[quotas]\nstore = "{database.url}"\n[ledger]\ndirectory = "{ledger}"\nstore = "{database.url}"\nwhen_failing = "serve"\n'


async def abuse(routers: Sequence[Running], database: Postgres, seconds: float) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as session:
        given = {name: Given() for name in LIMITS}
        took_s, *_ = await asyncio.gather(
            _all(session, routers, "minute", given["minute"], seconds, ENOUGH),
            _all(session, routers, "day", given["day"], seconds, ENOUGH),
            _all(session, routers, "open", given["open"], seconds),
        )
        await asyncio.to_thread(database.kill)
        await _all(session, routers, "away", given["away"], seconds)
        while_away = sum(given["away"].answers)
        each_while_away = [*given["away"].answers]
        await asyncio.to_thread(database.start)
        settled_s = await _until_known(database, while_away)
        after = Given()
        await _all(session, routers, "away", after, 1.0)
    allowed = PER_MIN * (1 + took_s / 60)
    tokens = await asyncio.to_thread(_tokens, database)
    results = {
        "routers": NUM_ROUTERS,
        "clients": CLIENTS * NUM_ROUTERS * 3,
        "took_s": round(took_s, 2),
        "error": f"at most a lease, {LEASE_SHARE:.4g} of the limit, stays unused at each router; the limit is never exceeded",
        "minute": {
            "allowed": round(allowed),
            "given": sum(given["minute"].answers),
            "by_router": given["minute"].answers,
        },
        "open": {"allowed": OPEN, "most": given["open"].most_open, "by_router": given["open"].answers},
        "day": {"allowed": PER_DAY, "tokens": tokens, "by_router": given["day"].answers},
        "refusals": {name: each.refusals for name, each in given.items()},
        "without_the_store": {
            "given": while_away,
            "by_router": each_while_away,
            "settled_s": settled_s,
            "given_after": sum(after.answers),
        },
        "failures": {name: each.failures for name, each in given.items() if each.failures},
    }
    return {**results, "faults": faults(results)}


def faults(results: dict[str, Any]) -> list[str]:
    """Return the deviations from the expected results."""
    found = [f"{name}: {statuses}" for name, statuses in results["failures"].items()]
    minute, day, away = results["minute"], results["day"], results["without_the_store"]
    if not minute["allowed"] - _unused(PER_MIN) <= minute["given"] <= minute["allowed"] + 1:
        found.append(f"{minute['given']} requests in a minute; the limit is {minute['allowed']}")
    if not OPEN - _unused(OPEN) <= results["open"]["most"] <= OPEN:
        found.append(f"{results['open']['most']} open requests; the limit is {OPEN}")
    if not PER_DAY - _unused(PER_DAY) - STREAM_TOKENS * 2 <= day["tokens"] <= PER_DAY:
        found.append(f"{day['tokens']} tokens; the limit is {PER_DAY}")
    if min(away["by_router"]) == 0:
        found.append("a router without its store admitted nothing")
    if away["given"] > NUM_ROUTERS * (PER_MIN + results["took_s"] * PER_MIN / 60 + 1):
        found.append(f"{away['given']} requests, too many, without the store")
    if away["settled_s"] is None or away["given_after"] > _unused(PER_MIN):
        found.append("usage during the store's outage is missing")
    return found


def _unused(limit: int) -> float:
    """Return the largest part of the limit that may stay unused.

    For each router it is one lease, and a remainder that is too small for a request.
    """
    return NUM_ROUTERS * (max(1.0, limit * LEASE_SHARE) + 1)


async def _all(
    session: aiohttp.ClientSession, routers: Sequence[Running], name: str, given: Given, seconds: float, enough: int = 0
) -> float:
    """Send requests for `seconds`, and until `enough` are refused; return the seconds that it took.

    Stops LONGEST_S after `seconds` at the latest.
    """
    began = time.monotonic()
    until = began + seconds
    asking = [
        _ask(session, router.url, i, name, given, until, enough)
        for i, router in enumerate(routers)
        for _ in range(CLIENTS)
    ]
    await asyncio.gather(*asking)
    return time.monotonic() - began


async def _ask(
    session: aiohttp.ClientSession, url: str, router: int, name: str, given: Given, until: float, enough: int
) -> None:
    is_stream = name == "open"
    body = {
        "model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": STREAM_TOKENS, "stream": is_stream,
    }  # fmt: skip
    headers = {"authorization": f"Bearer {_key(name)}"}
    while (now := time.monotonic()) < until or (given.refusals < enough and now < until + LONGEST_S):
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status == 200:
                given.answers[router] += 1
                given.open += 1
                given.most_open = max(given.most_open, given.open)
                await answer.read()
                given.open -= 1
            elif answer.status == 429:
                given.refusals += 1
                await asyncio.sleep(PAUSE_S)
            else:
                given.failures[answer.status] = given.failures.get(answer.status, 0) + 1
                await asyncio.sleep(PAUSE_S)


async def _until_known(database: Postgres, given: int) -> float | None:
    """Return the seconds until the database has the usage of its outage; None after SETTLED_S without it."""
    began = time.monotonic()
    while (waited_s := time.monotonic() - began) < SETTLED_S:
        used = await asyncio.to_thread(_used, database)
        if used + (waited_s + 1) * PER_MIN / 60 >= given:
            return round(waited_s, 2)
        await asyncio.sleep(0.1)
    return None


def _used(database: Postgres) -> float:
    with psycopg.connect(database.url) as connection:
        found = connection.execute("SELECT used FROM quota_use WHERE account = 'away'").fetchone()
        return 0.0 if found is None else float(found[0])


def _tokens(database: Postgres) -> int:
    with psycopg.connect(database.url) as connection:
        found = connection.execute(
            "SELECT SUM(prompt_tokens + output_tokens) FROM usage WHERE account = 'day'"
        ).fetchone()
        return 0 if found is None else int(found[0] or 0)


def _key(account: str) -> str:
    return f"sk-of-{account}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of abuse")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results = measure(options.seconds)
    Console().print(results)
    if not options.no_record:
        print(write_record("shared-quotas", results, ("psycopg",)))
    if results["faults"]:
        raise SystemExit("; ".join(results["faults"]))


if __name__ == "__main__":
    main()

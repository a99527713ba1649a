"""Is the ledger right when processes are killed? `make bench-ledger` runs it.

python -m load_tests.scenarios.ledger

A router with a ledger and its sites run on this machine, with clients that stream and clients that do not. At random times SIGKILL goes to a router,
a site, an engine host or, with --postgres, the ledger's database, one after another. Clients count the token ids that they receive. Afterwards each
request must be in the ledger once, with at least the tokens that its client received, at most those that it requested, and the exact number if the
client read to the end. Further clients call a function, which calls the model inside its site; its tokens are compared as a sum, since no client sees
those requests' ids.
"""

import argparse
import asyncio
import random
import signal
import sqlite3
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, LiteralString

import aiohttp
import orjson
import psutil
import psycopg
from rich.console import Console

from load_tests.local_network import LocalNetwork
from load_tests.postgres import Postgres, running_postgres
from load_tests.records import write_record
from pilotlight.wire.sse import EventDecoder

TARGETS = ("router", "site", "engine")
DATABASE = "database"
DATABASE_AWAY_S = 1.0  # the longest time for which the database is down
MAX_TOKENS = 32
FUNCTION = "asks"
NUM_FUNCTION_CLIENTS = 2
ASKED_WITHIN_S = 4.0  # time for each site to get a first request; after that it records functions' usage
COLLECTED_S = 30.0  # limit until the sites' records are in the ledger
SOURCE = """
import json
from workers import Response, WorkerEntrypoint

class Default(WorkerEntrypoint):
    async def fetch(self, request):
        inputs = await request.json()
        answer = await self.env.AI.run("ember", inputs)
        if not inputs["stream"]:
            return Response.json(answer["usage"])
        events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
        return Response.json(next(usage for event in reversed(events) if (usage := json.loads(event).get("usage"))))
"""
MANIFEST = f'name = "{FUNCTION}"\nmain = "entry.py"\ncompatibility_flags = ["python_workers"]\n[ai]\nbinding = "AI"\n'
SECRET = "a secret of this benchmark's own"  # a restarted router authenticates its sites with it


@dataclass
class Received:
    """The received part of one answer."""

    tokens: int = 0
    is_whole: bool = False


class Clients:
    """Clients that send request after request, each with its own id."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self.received: dict[str, Received] = {}
        self.is_stopping = False

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            await asyncio.gather(*(self._ask(session, number) for number in range(self._count)))

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while not self.is_stopping:
            name = f"client-{number}-{turn}"
            turn += 1
            mine = self.received[name] = Received()
            body: dict[str, Any] = {
                "model": "ember", "prompt": f"{name} says", "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True,
                "seed": turn, "stream": number % 3 != 0,
            }  # fmt: skip
            try:
                async with session.post(
                    f"{self._url}/v1/completions", json=body, headers={"x-request-id": name}
                ) as answer:
                    if answer.status == 200:
                        await (self._read(answer, mine) if body["stream"] else self._whole(answer, mine))
                    else:
                        await asyncio.sleep(0.1)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.1)

    async def _whole(self, answer: aiohttp.ClientResponse, mine: Received) -> None:
        fields = orjson.loads(await answer.read())
        mine.tokens = len(fields["choices"][0]["token_ids"])
        assert fields["usage"]["completion_tokens"] == mine.tokens
        mine.is_whole = True

    async def _read(self, answer: aiohttp.ClientResponse, mine: Received) -> None:
        decoder = EventDecoder()
        async for chunk in answer.content.iter_any():
            for event in decoder.feed(chunk):
                if event.is_done:
                    mine.is_whole = True
                elif event.data is not None:
                    for choice in orjson.loads(event.data).get("choices", ()):
                        mine.tokens += len(choice.get("token_ids") or ())


class FunctionClients:
    """Clients of a function that calls the model once per request, and returns its number of tokens."""

    def __init__(self, url: str, count: int) -> None:
        self._url = url
        self._count = count
        self.num_asked = 0
        self.received: list[int] = []
        self.is_stopping = False

    async def run(self) -> None:
        await asyncio.sleep(ASKED_WITHIN_S)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            await asyncio.gather(*(self._ask(session, number) for number in range(self._count)))

    async def _ask(self, session: aiohttp.ClientSession, number: int) -> None:
        while not self.is_stopping:
            self.num_asked += 1
            body = {"prompt": f"call {self.num_asked}", "max_tokens": MAX_TOKENS, "stream": number % 2 == 1}
            try:
                async with session.post(f"{self._url}/fn/{FUNCTION}/", json=body) as answer:
                    if answer.status == 200:
                        self.received.append(orjson.loads(await answer.read())["completion_tokens"])
                    else:
                        await asyncio.sleep(0.1)
            except (aiohttp.ClientError, TimeoutError):
                await asyncio.sleep(0.1)


async def disturb(
    network: LocalNetwork, kills: int, num_clients: int, rng: random.Random, database: Postgres | None
) -> tuple[Clients, FunctionClients]:
    """Kill `kills` processes under load, each after all are healthy again; then let the clients end."""
    targets = TARGETS if database is None else (*TARGETS, DATABASE)
    clients, functions = Clients(network.url, num_clients), FunctionClients(network.url, NUM_FUNCTION_CLIENTS)
    load = [asyncio.create_task(each.run()) for each in (clients, functions)]
    for number in range(kills):
        await asyncio.sleep(rng.uniform(0.3, 1.2))
        target = targets[number % len(targets)]
        if target == DATABASE and database is not None:
            await asyncio.to_thread(database.kill)
            await asyncio.sleep(rng.uniform(0.0, DATABASE_AWAY_S))
            await asyncio.to_thread(database.start)
            continue
        pid = await asyncio.to_thread(pid_of, network, target, rng)
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(signal.SIGKILL)
        await asyncio.to_thread(wait_until_well, network, pid)
    clients.is_stopping = functions.is_stopping = True
    await asyncio.gather(*load)
    await _collected(network, functions)
    await asyncio.to_thread(_get, f"{network.url}/usage")  # reading usage writes the records of ended requests
    return clients, functions


async def _collected(network: LocalNetwork, functions: FunctionClients) -> None:
    """Wait until sites have delivered the function's usage; give up after COLLECTED_S."""
    deadline = time.monotonic() + COLLECTED_S
    while time.monotonic() < deadline:
        told = await asyncio.to_thread(_get, f"{network.url}/usage?by=function,model")
        if sum(row["requests"] for row in told["usage"] if row["function"] and row["model"]) >= len(functions.received):
            break
        await asyncio.sleep(0.5)
    await asyncio.sleep(2.0)  # for the end of requests whose clients got no answer


OF_CLIENTS = "SELECT request_id, outcome, output_tokens, prompt_tokens, device_us FROM usage WHERE function = ''"
OF_FUNCTIONS = "SELECT function, output_tokens, cpu_us FROM usage WHERE function <> ''"


def records(asked: LiteralString, folder: Path, database: Postgres | None) -> list[Any]:
    """Return the ledger's records."""
    if database is not None:
        with psycopg.connect(database.url) as asking:
            return asking.execute(asked).fetchall()
    with closing(sqlite3.connect(folder / "usage.sqlite")) as connection:
        return connection.execute(asked).fetchall()


def judge(rows: list[Any], clients: Clients) -> dict[str, Any]:
    """Compare the ledger's records with what clients received."""
    found = {name: tokens for name, _, tokens, *_ in rows}
    received = clients.received
    times = Counter(name for name, *_ in rows)
    return {
        "requests": len(received),
        "read_to_the_end": sum(mine.is_whole for mine in received.values()),
        "cut": sum(not mine.is_whole and mine.tokens > 0 for mine in received.values()),
        "outcomes": dict(Counter(outcome for _, outcome, *_ in rows)),
        "tokens_received": sum(mine.tokens for mine in received.values()),
        "tokens_in_the_ledger": sum(found.values()),
        "twice": [name for name, count in times.items() if count > 1],
        "fewer_than_received": [name for name, mine in received.items() if found.get(name, 0) < mine.tokens],
        "more_than_made": [name for name, tokens in found.items() if tokens > MAX_TOKENS],
        "unequal_though_read_to_the_end": [
            name for name, mine in received.items() if mine.is_whole and found.get(name) != mine.tokens
        ],
        "without_their_prompt": [name for name, _, tokens, prompt, _ in rows if tokens and not prompt],
        "without_their_device_time": [name for name, _, tokens, _, device_us in rows if tokens and not device_us],
        "device_s": sum(device_us for *_, device_us in rows) / 1e6,
        "nobodys": [name for name in found if name not in received],
    }


def judge_functions(rows: list[Any], clients: FunctionClients) -> dict[str, Any]:
    """Compare the ledger's records of a function's calls with the tokens that the function received."""
    in_ledger = [tokens for _, tokens, cpu_us in rows if not cpu_us]
    return {
        "function_calls": clients.num_asked,
        "function_answers": len(clients.received),
        "function_records": len(in_ledger),
        "function_tokens_received": sum(clients.received),
        "function_tokens_in_the_ledger": sum(in_ledger),
        "function_cpu_s": sum(cpu_us for *_, cpu_us in rows) / 1e6,
        "function_answers_without_their_record": sorted((Counter(clients.received) - Counter(in_ledger)).elements()),
        "function_records_nobody_asked_for": max(0, len(in_ledger) - clients.num_asked),
        "function_records_beyond_what_was_asked_for": [tokens for tokens in in_ledger if tokens > MAX_TOKENS],
        "functions_of_another_name": [name for name, *_ in rows if name != FUNCTION],
    }


FAULTS = ("twice", "fewer_than_received", "more_than_made", "unequal_though_read_to_the_end", "without_their_prompt",
          "without_their_device_time", "nobodys", "function_answers_without_their_record", "function_records_nobody_asked_for",
          "function_records_beyond_what_was_asked_for", "functions_of_another_name")  # fmt: skip


def measure(
    kills: int, num_clients: int, seed: int = 0, *, in_postgres: bool = False, engine_settings: str = ""
) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="pilotlight-ledger-") as folder,
        running_postgres() if in_postgres else nullcontext() as database,
    ):
        settings = f'\n[ledger]\ndirectory = "{folder}"\nwhen_failing = "serve"\n'
        if database is not None:
            settings += f'store = "{database.url}"\n'
        environment = {"PILOTLIGHT_HOP_SECRET": SECRET}
        code = Path(folder) / FUNCTION
        code.mkdir()
        (code / "entry.py").write_text(SOURCE)
        (code / "wrangler.toml").write_text(MANIFEST)
        serving = f'\n[functions]\nserve = [{{ name = "{FUNCTION}", path = "{code}" }}]\n'
        with LocalNetwork(
            num_sites=2,
            network_settings=settings,
            site_settings=serving,
            engine_settings=engine_settings,
            environment=environment,
        ) as network:
            started = time.monotonic()
            clients, functions = asyncio.run(disturb(network, kills, num_clients, random.Random(seed), database))
            took_s = time.monotonic() - started
        return {
            "kills": kills,
            "clients": num_clients,
            "store": "PostgreSQL" if in_postgres else "SQLite",
            "took_s": round(took_s, 1),
            **judge(records(OF_CLIENTS, Path(folder), database), clients),
            **judge_functions(records(OF_FUNCTIONS, Path(folder), database), functions),
        }


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return orjson.loads(answer.read())


def pid_of(network: LocalNetwork, target: str, rng: random.Random) -> int:
    status = _get(f"{network.url}/status")
    if target == "router":
        return int(status["process"]["pid"])
    pids = [
        process["pid"]
        for site in status["sites"]
        for process in site["status"]["processes"]
        if process["role"] == target
    ]
    return int(rng.choice(pids))


def wait_until_well(network: LocalNetwork, killed: int) -> None:
    """Wait until the router and all its sites are ready, and none of their processes is the killed one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError, KeyError, TypeError, urllib.error.URLError):
            status = _get(f"{network.url}/status")
            processes = [status["process"], *(each for site in status["sites"] for each in site["status"]["processes"])]
            is_well = all(site["state"] == "healthy" and site["status"]["ready"] for site in status["sites"])
            if is_well and killed not in [process["pid"] for process in processes]:
                return
        time.sleep(0.05)
    raise RuntimeError(f"a minute after {killed} was killed the network has not recovered")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Kill processes under load and compare the ledger with the tokens that clients received."
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL keeps the ledger, and is killed too")
    arguments = parser.parse_args()
    results = measure(arguments.kills, arguments.clients, arguments.seed, in_postgres=arguments.postgres)
    Console().print(results)
    print(write_record("ledger", results))
    if any(results[fault] for fault in FAULTS):
        raise SystemExit("the ledger is wrong")


if __name__ == "__main__":
    main()

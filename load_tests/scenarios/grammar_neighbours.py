"""The effect of one account's slow schemas on the first tokens of another account.

python -m load_tests.scenarios.grammar_neighbours

The network has a router and one site. The first account keeps several requests open, each with a new schema of the slowest kinds that are admitted.
The other account sends chats one at a time, each with a new small schema that must be compiled. Rounds without and with the first account alternate.
"""

import argparse
import asyncio
import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from statistics import median, quantiles
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record

KEYS = {"first": "sk-of-the-first-account", "other": "sk-of-the-other-account"}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_RATIO = 1.5
START_S = 2.0  # the process that sends slow schemas needs a second to start
REST_S = 1.0  # a compile that is running ends, or its limit stops it


def ordinary_schema(rng: random.Random) -> dict[str, Any]:
    names = ["".join(rng.choices(LETTERS, k=6)) for _ in range(4)]
    kinds = ({"type": "string", "maxLength": 20}, {"type": "integer"}, {"enum": ["a", "b", "c"]}, {"type": "boolean"})
    return {"type": "object", "properties": dict(zip(names, kinds, strict=True)), "required": names}


def slow_schema(rng: random.Random) -> dict[str, Any]:
    """Draw a new schema: many optional properties, nested repetitions, or a long alternation."""
    kind = rng.randrange(3)
    if kind == 0:
        names = ["".join(rng.choices(LETTERS, k=8)) for _ in range(400)]
        return {"type": "object", "properties": {name: {"pattern": f"^{name[:3]}[a-z]{{1,40}}$"} for name in names}}
    if kind == 1:
        low, high = rng.randrange(1, 9), rng.randrange(200, 2000)
        return {"type": "string", "pattern": f"^(([a-z]{{1,{high}}}|[0-9a-f]{{{low},{high}}}) ?){{1,{high}}}$"}
    return {"enum": ["".join(rng.choices(LETTERS, k=40)) for _ in range(2000)]}


def constrained(schema: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "ember", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "max_tokens": 4, "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}},
    }  # fmt: skip


async def first_token_ms(session: aiohttp.ClientSession, url: str, schema: dict[str, Any]) -> float:
    began = time.perf_counter()
    headers = {"authorization": f"Bearer {KEYS['other']}"}
    first = 0.0
    async with session.post(f"{url}/v1/chat/completions", json=constrained(schema), headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if not first and line.startswith(b"data: {") and b'"content":"' in line:
                first = 1e3 * (time.perf_counter() - began)
    return first


async def send_slow(url: str, clients: int, seed: int, count: Callable[[int], None]) -> None:
    """Keep requests with slow schemas open until cancelled; call `count` with each answer's status."""
    headers = {"authorization": f"Bearer {KEYS['first']}"}

    async def send(session: aiohttp.ClientSession, rng: random.Random) -> None:
        while True:
            body = constrained(slow_schema(rng))
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                await answer.read()
                count(answer.status)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        await asyncio.gather(*(send(session, random.Random(seed + i)) for i in range(clients)))


@contextmanager
def other_load(url: str, clients: int, seed: int, statuses: Counter[int]) -> Iterator[None]:
    """Run `send_slow` in a separate process, so that it does not delay the measuring client."""
    answers: SimpleQueue[int] = get_context("spawn").SimpleQueue()
    process = get_context("spawn").Process(target=_send_slow, args=(url, clients, seed, answers))
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()
        while not answers.empty():
            statuses[answers.get()] += 1


def _send_slow(url: str, clients: int, seed: int, answers: "SimpleQueue[int]") -> None:
    asyncio.run(send_slow(url, clients, seed, answers.put))


async def rounds(url: str, number: int, samples: int, clients: int, seed: int) -> dict[str, Any]:
    rng, statuses = random.Random(seed), Counter[int]()
    found: dict[str, list[list[float]]] = {"quiet": [], "beside": []}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        for _ in range(20):
            await first_token_ms(session, url, ordinary_schema(rng))
        for _ in range(number):
            for name in rng.sample([*found], 2):
                with other_load(url, clients if name == "beside" else 0, rng.randrange(1 << 30), statuses):
                    await asyncio.sleep(START_S)
                    found[name].append(
                        [await first_token_ms(session, url, ordinary_schema(rng)) for _ in range(samples)]
                    )
                await asyncio.sleep(REST_S)
    return {**{name: summary(times) for name, times in found.items()}, "slow_statuses": dict(statuses)}


def summary(times: list[list[float]]) -> dict[str, Any]:
    every = sorted(chain.from_iterable(times))
    return {
        "samples": len(every),
        "p50_ms": round(median(every), 2),
        "p99_ms": round(quantiles(every, n=100)[98], 2),
        "p99_ms_of_rounds": [round(quantiles(each, n=100)[98], 2) for each in times],
        "most_ms": round(every[-1], 2),
    }


def measure(number: int, samples: int, clients: int, seed: int) -> dict[str, Any]:
    accounts = "".join(
        f'[[keys]]\nname = "{name}"\nkey_sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\naccount = "{name}"\n[[accounts]]\nname = "{name}"\n'
        for name, key in KEYS.items()
    )
    with LocalNetwork(num_sites=1, network_settings=f"require_key = true\n{accounts}") as network:
        found = asyncio.run(rounds(network.url, number, samples, clients, seed))
    ratio = {name: round(found["beside"][name] / found["quiet"][name], 2) for name in ("p50_ms", "p99_ms")}
    return {"rounds": number, "clients": clients, "seed": seed, **found, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--samples", type=int, default=100, help="requests of the other account in each round")
    parser.add_argument("--clients", type=int, default=8, help="requests that the first account keeps open")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results = measure(options.rounds, options.samples, options.clients, options.seed)
    table = Table("", "requests", "first token p50", "p99", "longest (ms)")
    for name in ("quiet", "beside"):
        row = results[name]
        table.add_row(name, *(str(row[key]) for key in ("samples", "p50_ms", "p99_ms", "most_ms")))
    table.add_row("ratio", "", *(str(value) for value in results["ratio"].values()), "")
    console = Console()
    console.print(table, f"the first account's answers by status: {results['slow_statuses']}")
    if not options.no_record:
        console.print(f"Record: {write_record('grammar-neighbours', results)}", soft_wrap=True)
    if results["ratio"]["p99_ms"] > MAX_RATIO:
        raise SystemExit(f"the other account's p99 is more than {MAX_RATIO} times its quiet one")


if __name__ == "__main__":
    main()

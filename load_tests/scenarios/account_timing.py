"""Does an answer's latency reveal which prompts another account has sent?

`make bench-account-timing` runs it: python -m load_tests.scenarios.account_timing.

One account sends a prompt, which its site then has in its prefix cache. In random order, another account sends the same prompt and one with the same
words in a new order. The mean difference of the times to first token, over many such pairs, is what it could learn. As a control it then repeats the
first prompt: its own cached prompt must take visibly less time, or the measurement shows nothing. Cached tokens are counted as well: none may come
from another account.
"""

import argparse
import asyncio
import hashlib
import random
import time
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
import orjson
from rich.console import Console

from load_tests.local_network import LocalNetwork
from load_tests.paired import chance, interval
from load_tests.records import write_record

KEYS = {"first": "sk-of-the-first-account", "other": "sk-of-the-other-account"}
SECRET = "a secret of this benchmark's own"
WORDS = 300  # words of a prompt
WORD = "abcdefghijklmnopqrstuvwxyz"
LEAST_CHANCE = 0.01  # below this p-value a difference is not random


class Asked(NamedTuple):
    first_token_ms: float
    cached_tokens: int
    prompt_tokens: int


class Pair(NamedTuple):
    others: Asked  # answer to the prompt that the first account, and not this one, has cached
    nobodys: Asked
    own: Asked  # answer to the same prompt again, which this account now has cached


async def ask(session: aiohttp.ClientSession, url: str, account: str, prompt: str) -> Asked:
    body = {
        "model": "ember", "prompt": prompt, "max_tokens": 1, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage: dict[str, Any] = {}
    began, first_ms = time.perf_counter(), 0.0
    headers = {"authorization": f"Bearer {KEYS[account]}"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                first_ms = first_ms or 1e3 * (time.perf_counter() - began)
                usage = orjson.loads(line[6:]).get("usage") or usage
    return Asked(first_ms, usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"])


async def pairs(url: str, count: int, rng: random.Random) -> list[Pair]:
    made = []
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        for number in range(count + 1):
            words = ["".join(rng.choices(WORD, k=4)) for _ in range(WORDS)]
            prompts = {name: " ".join(rng.sample(words, WORDS)) for name in ("others", "nobodys")}
            await ask(session, url, "first", prompts["others"])
            times = {}
            for name in rng.sample([*prompts], 2):
                times[name] = await ask(session, url, "other", prompts[name])
            times["own"] = await ask(session, url, "other", prompts["others"])
            if number:  # the first pair only warms connections
                made.append(Pair(**times))
    return made


def measure(count: int, seed: int = 0, num_sites: int = 2) -> dict[str, Any]:
    accounts = "".join(
        f'[[keys]]\nname = "{name}"\nkey_sha256 = "{hashlib.sha256(key.encode()).hexdigest()}"\naccount = "{name}"\n[[accounts]]\nname = "{name}"\n'
        for name, key in KEYS.items()
    )
    settings = f"require_key = true\n{accounts}"  # appended after the [door] table
    environment = {"PILOTLIGHT_HOP_SECRET": SECRET}
    with LocalNetwork(num_sites=num_sites, network_settings=settings, environment=environment) as network:
        return judge(asyncio.run(pairs(network.url, count, random.Random(seed))), random.Random(seed))


def judge(made: list[Pair], rng: random.Random) -> dict[str, Any]:
    differences = [pair.others.first_token_ms - pair.nobodys.first_token_ms for pair in made]
    control = [pair.own.first_token_ms - pair.nobodys.first_token_ms for pair in made]
    return {
        "pairs": len(made),
        "prompt_tokens": round(fmean(pair.others.prompt_tokens for pair in made)),
        "first_token_ms": {
            name: round(median(getattr(pair, name).first_token_ms for pair in made), 3) for name in Pair._fields
        },
        "cached_tokens": {name: sum(getattr(pair, name).cached_tokens for pair in made) for name in Pair._fields},
        "difference_ms": round(fmean(differences), 4),
        "difference_95_ms": [round(bound, 4) for bound in interval(differences, rng)],
        "chance": round(chance(differences, rng), 4),
        "control_difference_ms": round(fmean(control), 4),
        "control_95_ms": [round(bound, 4) for bound in interval(control, rng)],
        "control_chance": round(chance(control, rng), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    results = measure(options.pairs, options.seed)
    Console().print(results)
    if not options.no_record:
        print(write_record("account-timing", results))
    if results["cached_tokens"]["others"] or results["cached_tokens"]["nobodys"]:
        raise SystemExit("another account's prompt was found in the cache")
    if results["control_chance"] > LEAST_CHANCE:
        raise SystemExit("the times do not even reveal an account's own cached prompt: the measurement shows nothing")
    if results["chance"] < LEAST_CHANCE:
        raise SystemExit("the times reveal another account's cached prompt")


if __name__ == "__main__":
    main()

"""Resources still held after 2,000 clients disconnect within a second: `make bench-abort-storm`.

python -m load_tests.scenarios.abort_storm

The network is a router and one site, first with one engine host, then with a prefill host and a decode host. All clients close their connections in
the same phase of their requests: while most are queued, during prefill, while KV blocks move to the other host, during decode, during decode with a
grammar, or while pictures are encoded. The results are the time after the last disconnect until no request, permit, sequence, pinned KV block or
connection is counted any more, and the time until a small fixed load has its throughput again.

Published (sglang#28651): after an abort storm a fleet with separate prefill and decode hosts failed 89 % of its requests for more than an hour.
"""

import argparse
import asyncio
import random
import re
import statistics
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
from PIL import Image
from rich.console import Console
from rich.table import Table

from load_tests.client import stream_chat
from load_tests.local_network import LocalNetwork
from load_tests.random_checkpoint import write_seeing
from load_tests.records import write_record

CLIENTS = 2000
SEEING = "seer"
LEAVE_WITHIN_S = 1.0
FREE_WITHIN_S = 1.0  # seconds after the last disconnect in which all must be released
WORK_STREAMS, WORK_TOKENS = 8, 160
WORKS = 7  # measurements before a storm
SHARE = 0.95  # of the median throughput before the storm must return, or as much as the slowest measurement before had
AFTER_S = 5.0  # seconds in which the throughput must return
LIMITS = "\n[limits]\nmax_inflight = 4096\n"
SPLIT = "".join(f'\n[[engine.hosts]]\ndevice = "cpu"\nrole = "{role}"\n' for role in ("prefill", "decode"))
CACHE = (
    "kv_gib = 1"  # a site reserves at most eight times its KV cache: 410 long prompts, and twice as many with two hosts
)
SETTINGS: dict[str, dict[str, Any]] = {
    "one host": {"num_sites": 1, "site_settings": LIMITS, "engine_settings": CACHE},
    "prefill and decode": {
        "num_sites": 1,
        "site_settings": LIMITS + SPLIT,
        "engine_settings": f"{CACHE}\nkv_host_gib = 0.125",
    },
}
WORDS = ("pilot", "light", "stove", "warm", "blue", "flame", "valve", "spark")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name", "age"]}  # fmt: skip
# Metrics that must be zero without requests
SITE_GAUGES = {
    "permits": r"^pilotlight_inflight_requests(?:\{.*\})? (\S+)$",
    "reserved tokens": r"^pilotlight_reserved_tokens(?:\{.*\})? (\S+)$",
    "sequences": r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$",
    "pinned blocks": r"^pilotlight_kv_pinned_blocks\{.*\} (\S+)$",
}
ROUTER_GAUGES = {"requests": r"^pilotlight_router_open_requests (\S+)$"}
CONNECTIONS = r"^pilotlight_router_connections (\S+)$"


class Phase(NamedTuple):
    name: str
    num_words: int
    options: dict[str, Any]  # `model` is Ember without it
    has_come: Callable[[dict[str, float], int], bool]  # arguments: gauges, number of streams with a token
    needs_roles: bool = False  # it exists only between a prefill host and a decode host
    has_picture: bool = False


LONG = 500  # words of a long prompt: some 3,400 tokens, of the 4,096 that the model takes
PHASES = (
    Phase("queued", 8, {"max_tokens": 32, "ignore_eos": True}, lambda gauges, told: gauges["permits"] >= CLIENTS / 2),
    Phase(
        "prefill", LONG, {"max_tokens": 8, "ignore_eos": True}, lambda gauges, told: gauges["permits"] >= 0.15 * CLIENTS
    ),
    Phase(
        "transfer", LONG, {"max_tokens": 8, "ignore_eos": True}, lambda gauges, told: gauges["pinned blocks"] > 0, needs_roles=True
    ),
    Phase("decode", 4, {"max_tokens": 400, "ignore_eos": True}, lambda gauges, told: told >= 32),
    Phase(
        "grammar", 4,
        {"max_tokens": 400, "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}},
        lambda gauges, told: gauges["sequences"] >= CLIENTS / 4,
    ),
    Phase(
        "pictures", 4, {"model": SEEING, "max_tokens": 8, "ignore_eos": True},
        lambda gauges, told: gauges["sequences"] >= CLIENTS / 4 and told > 0, has_picture=True,
    ),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--only", default="", help="only settings whose names contain this text")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    for name, setting in SETTINGS.items():
        if options.only in name:
            with (
                tempfile.TemporaryDirectory() as folder,
                LocalNetwork(**_with_seeing(setting, Path(folder))) as network,
            ):
                for phase in (each for each in PHASES if SPLIT in setting["site_settings"] or not each.needs_roles):
                    with console.status(f"{name}, {phase.name}"):
                        rows.append({"setting": name, **asyncio.run(storm(network, phase, options.clients))})
    show(console, rows)
    if not options.no_record:
        console.print(
            f"Record: {write_record('abort-storm', {'clients': options.clients, 'rows': rows})}", soft_wrap=True
        )
    return int(any(row["wrong"] for row in rows))


def _with_seeing(setting: dict[str, Any], folder: Path) -> dict[str, Any]:
    source = write_seeing(folder / SEEING)
    model = f'\n[[models]]\nname = "{SEEING}"\nsource = "{source}"\n'
    return {**setting, "site_settings": setting["site_settings"] + model}


async def storm(network: LocalNetwork, phase: Phase, clients: int) -> dict[str, Any]:
    """Let clients connect and disconnect in one phase; return the measurements."""
    gauges = _Gauges(network)
    works_s = [await _work_s(network.url) for _ in range(WORKS)]
    before_s = max(statistics.median(works_s) / SHARE, *works_s)  # a machine's own noise can be more than the share
    connections_before = await gauges.connections()
    told: set[int] = set()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as session:
        tasks = [asyncio.create_task(_ask(session, network.url, phase, number, told)) for number in range(clients)]
        came_s = await _until(gauges.read, lambda found: phase.has_come(_scaled(found, clients), len(told)), 120.0)
        held = gauges.latest
        began = time.perf_counter()
        for number, task in enumerate(tasks):
            task.cancel()
            if number % 100 == 99:
                await asyncio.sleep(0.9 * LEAVE_WITHIN_S * 100 / clients)
        await asyncio.gather(*tasks, return_exceptions=True)
    left_s = time.perf_counter() - began
    free_s = await _until(gauges.read, lambda found: not any(found.values()), 60.0)
    connections_s = await _until(gauges.connections, lambda found: found <= connections_before + 1, 60.0)
    recovered_s = await _until(lambda: _work_s(network.url), lambda took_s: took_s <= before_s, AFTER_S)
    wrong = [f"the phase was not reached: {held}"] if came_s is None else []
    wrong += [f"not free after {free_s} s"] if free_s is None or free_s > FREE_WITHIN_S else []
    wrong += ["connections stay open"] if connections_s is None else []
    wrong += ["the throughput did not return"] if recovered_s is None else []
    return {
        "phase": phase.name, "came_s": came_s, "with_tokens": len(told), "held": held, "left_s": round(left_s, 2),
        "free_s": free_s, "connections_free_s": connections_s, "left_behind": await gauges.read(),
        "recovered_s": recovered_s, "work_before_s": [round(took_s, 2) for took_s in works_s], "wrong": wrong,
    }  # fmt: skip


def _scaled(found: dict[str, float], clients: int) -> dict[str, float]:
    """Scale the gauges to CLIENTS clients, so that the thresholds of phases also hold for a smaller storm."""
    return {name: value * CLIENTS / clients for name, value in found.items()}


async def _ask(session: aiohttp.ClientSession, url: str, phase: Phase, number: int, told: set[int]) -> None:
    draw = random.Random(f"{phase.name} {number}")  # no phase finds the prompts of another one cached
    words = " ".join(draw.choice(WORDS) + str(draw.randrange(10**4)) for _ in range(phase.num_words))
    content = [{"type": "text", "text": words}, *([picture(draw)] if phase.has_picture else [])]
    messages = [{"role": "user", "content": content}]
    body = orjson.dumps({"model": "ember", "stream": True, "messages": messages, **phase.options})
    headers = {"content-type": "application/json"}
    async with session.post(f"{url}/v1/chat/completions", data=body, headers=headers) as answer:
        async for chunk in answer.content.iter_any():
            if b'"content"' in chunk:
                told.add(number)


def picture(draw: random.Random) -> dict[str, Any]:
    """Return the part of a message with a picture that no other has."""
    file = BytesIO()
    Image.frombytes("RGB", (16, 16), draw.randbytes(3 * 16 * 16)).save(file, "PNG")
    url = f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def _work_s(url: str) -> float:
    """Return the seconds that a small, fixed piece of work takes."""
    began = time.perf_counter()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        bodies = [
            {"model": "ember", "max_tokens": WORK_TOKENS, "ignore_eos": True, "temperature": 0,
             "messages": [{"role": "user", "content": f"Tell me the story number {number}."}]}
            for number in range(WORK_STREAMS)
        ]  # fmt: skip
        answers = await asyncio.gather(*(stream_chat(session, url, body) for body in bodies))
    failed = [answer.error for answer in answers if answer.error is not None or not answer.finished]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} streams failed: {failed[0]}")
    return time.perf_counter() - began


async def _until(read: Callable[[], Any], condition: Callable[[Any], bool], within_s: float) -> float | None:
    """Return the seconds until the value read fulfils the condition; None after the timeout."""
    began = time.perf_counter()
    while (now_s := time.perf_counter() - began) < within_s:
        if condition(await read()):
            return round(now_s, 3)
        await asyncio.sleep(0.01)
    return None


class _Gauges:
    """The counts of open requests at router and site."""

    def __init__(self, network: LocalNetwork) -> None:
        (self._site,) = network.site_urls.values()
        self._router = network.url
        self.latest: dict[str, float] = {}

    async def read(self) -> dict[str, float]:
        site, router = await asyncio.gather(_metrics(self._site), _metrics(self._router))
        found = {name: _sum(pattern, site) for name, pattern in SITE_GAUGES.items()}
        self.latest = found | {name: _sum(pattern, router) for name, pattern in ROUTER_GAUGES.items()}
        return self.latest

    async def connections(self) -> float:
        return _sum(CONNECTIONS, await _metrics(self._router))


async def _metrics(url: str) -> str:
    def fetch() -> str:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(fetch)


def _sum(pattern: str, text: str) -> float:
    return sum(float(value) for value in re.findall(pattern, text, re.MULTILINE))


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    titles = ("held then", "left in s", "all free after s", "connections after s", "throughput after s", "wrong")
    table = Table("setting", "phase", *titles, box=None, header_style="bold")
    for row in rows:
        held = ", ".join(f"{value:g} {name}" for name, value in row["held"].items() if value)
        columns = (row[name] for name in ("left_s", "free_s", "connections_free_s", "recovered_s"))
        table.add_row(row["setting"], row["phase"], held, *map(str, columns), "; ".join(row["wrong"]))
    console.print(table)


if __name__ == "__main__":
    raise SystemExit(main())

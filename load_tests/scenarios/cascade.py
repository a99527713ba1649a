"""The effect on clients of three engine hosts' deaths, one after the other: `make bench-cascade`.

python -m load_tests.scenarios.cascade

24 clients ask without a pause, each time a new prompt of some 3,800 tokens for an answer of 20. After a calm time three engine hosts are killed 60 s
apart, and in another run 2 s apart: those of one site, of three sites, of a site whose hosts compute prompts or answers, and of one whose ranks share
a model. Answers that were open at a kill, and a sample of the others, are asked for again when all is quiet: each text must be the same. A standby is
kept as at any site with memory for one.

A pause is the time in which a site has no engine host with its model. No first token may take longer than twice the longest of the calm time and the
pauses that its request met. `--plot FILE` draws kills, pauses and the arrivals of tokens.

Published for three kills 60 s apart (NVIDIA, 13 August 2026): 409 failed requests and 150 s without an answer; or 17 failed requests, if for each
engine a second one waits in 6.2 GB of its GPU. There a cluster of GPUs served a large model; here a small model runs on a CPU, so that counts can be
compared and seconds cannot.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from rich.console import Console
from rich.table import Table

from load_tests.client import StreamTimes, stream_chat
from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from load_tests.timeline import Bar, Row, svg

CLIENTS = 24
KILLS = 3
GAPS_S = (60.0, 2.0)
CALM_S = 30.0  # time without kills before the first and after the last one
ANSWER_TOKENS = 20
PROMPT_WORDS = 560  # words of a prompt, of some 6.8 tokens each
WATCH_S = 0.05
ASKED_AGAIN = 24  # size of the sample of answers that no kill touched
WORDS = ("pilot", "light", "stove", "warm", "blue", "flame", "valve", "spark")
SPLIT = "".join(f'\n[[engine.hosts]]\ndevice = "cpu"\nrole = "{role}"\n' for role in ("prefill", "decode"))
SETTINGS: dict[str, dict[str, Any]] = {
    "one site": {"num_sites": 1},
    "three sites": {"num_sites": 3},
    "prefill and decode": {"num_sites": 1, "site_settings": SPLIT, "engine_settings": "kv_host_gib = 0.125"},
    "two ranks": {"num_sites": 1, "engine_settings": 'devices = [["cpu", "cpu"]]'},
}
PUBLISHED = (
    ("NVIDIA, without a second engine", "60", "409", "150"),
    ("NVIDIA, with a second engine", "60", "17", ""),
)


Span = tuple[float, float]  # begin and end by time.perf_counter()


class Asked(NamedTuple):
    body: dict[str, Any]
    sent_s: float
    times: StreamTimes

    @property
    def has_failed(self) -> bool:
        return not self.times.finished or self.times.error is not None

    def was_open(self, at_s: float) -> bool:
        return self.sent_s <= at_s <= self.sent_s + self.times.e2el_s

    def first_token_s(self, pauses: Sequence[Span]) -> float | None:
        """Return the seconds until the first token, without those of the pauses."""
        ttft_s = self.times.ttft_s
        if ttft_s is None:
            return None
        until_s = self.sent_s + ttft_s
        return ttft_s - sum(max(0.0, min(end, until_s) - max(begin, self.sent_s)) for begin, end in pauses)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="settings whose names hold this text")
    parser.add_argument("--gaps", type=float, nargs="+", default=GAPS_S, metavar="S", help="seconds between two kills")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--calm", type=float, default=CALM_S, metavar="S")
    parser.add_argument("--plot", type=Path, help="file for a picture of kills, pauses and tokens (SVG)")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    console, rows = Console(), list[dict[str, Any]]()
    for name, setting in SETTINGS.items():
        for gap_s in options.gaps if options.only in name else ():
            with console.status(f"{name}, {gap_s:g} s apart"):
                rows.append({"setting": name, "gap_s": gap_s, **measured(setting, gap_s, options)})
    show(console, rows)
    if options.plot is not None:
        options.plot.write_text(plot(rows))
    if not options.no_record:
        console.print(f"Record: {write_record('cascade', {'clients': options.clients, 'rows': rows})}", soft_wrap=True)
    return int(any(row["failed"] or row["different"] or not row["is_in_time"] for row in rows))


def measured(setting: dict[str, Any], gap_s: float, options: argparse.Namespace) -> dict[str, Any]:
    with LocalNetwork(**setting) as network:
        asked, kills, pauses = asyncio.run(_disturbed(network, gap_s, options))
        _until_whole(network, options.calm)
        touched = [each for each in asked if any(each.was_open(at_s) for at_s in kills)]
        others = [each for each in asked if each not in touched]
        again = [*touched, *random.Random(0).sample(others, min(ASKED_AGAIN, len(others)))]
        whole = [each for each in again if not each.has_failed]
        undisturbed = asyncio.run(_ask_all(network.url, [each.body for each in whole], options.clients))
    calm = [each for each in asked if each.sent_s + each.times.e2el_s < kills[0]]
    return {
        **summary(asked, calm, kills, pauses),
        "compared": len(whole),
        "different": sum(
            one.times.text != other.text or one.times.usage.get("completion_tokens") != other.usage.get("completion_tokens")
            for one, other in zip(whole, undisturbed, strict=True)
        ),
    }  # fmt: skip


def summary(
    asked: Sequence[Asked], calm: Sequence[Asked], kills: Sequence[float], pauses: Sequence[Span]
) -> dict[str, Any]:
    """Return counts, and seconds.

    `dark_s` is the longest time from the first kill on in which no client got a token. Times of `pauses`, `kills` and `tokens_per_s` count from the
    first request.
    """
    began = min(each.sent_s for each in asked)
    without_pauses = [wait_s for each in asked if (wait_s := each.first_token_s(pauses)) is not None]
    calm_s = _worst(calm)
    arrivals = sorted(each.sent_s + at_s for each in asked for at_s in each.times.arrivals_s)
    late = [at_s for at_s in arrivals if at_s >= kills[0]]
    dark_s = max((after - before for before, after in zip([kills[0], *late], late, strict=False)), default=None)
    return {
        "requests": len(asked),
        "open_at_kills": sum(any(each.was_open(at_s) for at_s in kills) for each in asked),
        "failed": sum(each.has_failed for each in asked),
        "first_failure": next((each.times.error for each in asked if each.has_failed), None),
        "dark_s": None if dark_s is None else round(dark_s, 2),
        "calm_worst_first_token_s": calm_s,
        "worst_first_token_s": _worst(asked),
        "worst_without_pauses_s": round(max(without_pauses), 2) if without_pauses else None,
        "is_in_time": calm_s is not None and bool(without_pauses) and max(without_pauses) <= 2 * calm_s,
        "kills": [round(at_s - began, 2) for at_s in kills],
        "pauses": [(round(begin - began, 2), round(end - began, 2)) for begin, end in pauses],
        "tokens_at": sorted({int(at_s - began) for at_s in arrivals}),
        "prompt_tokens": max((each.times.usage.get("prompt_tokens", 0) for each in asked), default=0),
    }


def _worst(asked: Sequence[Asked]) -> float | None:
    waits = [each.times.ttft_s for each in asked if each.times.ttft_s is not None]
    return round(max(waits), 2) if waits else None


async def _disturbed(
    network: LocalNetwork, gap_s: float, options: argparse.Namespace
) -> tuple[list[Asked], list[float], list[Span]]:
    asked, kills, killed, has_ended = list[Asked](), list[float](), set[int](), asyncio.Event()
    down = dict[str, list[Span]]()

    has_answer = set[int]()  # clients whose first request has ended

    async def client(session: aiohttp.ClientSession, number: int) -> None:
        draw = random.Random(number)
        while not has_ended.is_set():
            body, sent_s = question(draw), time.perf_counter()
            asked.append(Asked(body, sent_s, await stream_chat(session, network.url, body)))
            has_answer.add(number)

    async with _session() as session, asyncio.TaskGroup() as group:
        for number in range(options.clients):
            group.create_task(client(session, number))
        for name in network.site_urls:
            group.create_task(_watch(network, name, has_ended, down.setdefault(name, [])))
        await asyncio.sleep(options.calm)
        while len(has_answer) < options.clients:  # the longest waits of the calm time are those of the first requests
            await asyncio.sleep(WATCH_S)
        for number in range(KILLS):
            await asyncio.sleep(gap_s if number else 0.0)
            pid = await asyncio.to_thread(_engine_host, network, number, killed)
            killed.add(pid)
            kills.append(time.perf_counter())
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(options.calm)
        has_ended.set()
    return asked, kills, merged([span for spans in down.values() for span in spans])


async def _watch(network: LocalNetwork, name: str, has_ended: asyncio.Event, down: list[Span]) -> None:
    """Record the spans in which a site is not ready."""
    was_ready = True
    while not has_ended.is_set():
        at_s, is_ready = time.perf_counter(), (await asyncio.to_thread(network.site_status, name)).ready
        if not is_ready:
            down[-1:] = [*down[-1:], (at_s, at_s)] if was_ready else [(down[-1][0], at_s)]
        was_ready = is_ready
        with suppress(TimeoutError):
            await asyncio.wait_for(has_ended.wait(), WATCH_S)


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return spans that do not overlap, in order, with the same union."""
    found = list[Span]()
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


async def _ask_all(url: str, bodies: Sequence[dict[str, Any]], at_once: int) -> list[StreamTimes]:
    places = asyncio.Semaphore(at_once)

    async def one(session: aiohttp.ClientSession, body: dict[str, Any]) -> StreamTimes:
        async with places:
            return await stream_chat(session, url, body)

    async with _session() as session:
        return await asyncio.gather(*(one(session, body) for body in bodies))


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=300))


def question(draw: random.Random) -> dict[str, Any]:
    """Return a request with a prompt that no other has, greedy or sampled."""
    words = " ".join(draw.choice(WORDS) + str(draw.randrange(10**4)) for _ in range(PROMPT_WORDS))
    sampled = {"temperature": 0.9, "seed": draw.randrange(10**6)} if draw.random() < 0.5 else {"temperature": 0}
    return {
        "model": "ember", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **sampled,
        "messages": [{"role": "user", "content": words}],
    }  # fmt: skip


def _engine_host(network: LocalNetwork, number: int, killed: set[int]) -> int:
    """Return the process id of the engine host to be killed as number `number`; the sites take turns.

    Waits for the successor of a killed one.
    """
    names = sorted(network.site_urls)
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        processes = network.site_status(names[number % len(names)]).processes
        hosts = [process.pid for process in processes if process.role == "engine"]
        hosts = [pid for pid in hosts if pid not in killed]
        if hosts:
            return hosts[number % len(hosts)]
        time.sleep(0.02)
    raise RuntimeError("a killed engine host was not replaced within 60 s")


def _until_whole(network: LocalNetwork, within_s: float) -> None:
    """Wait until every site has its model again."""
    deadline = time.monotonic() + max(60.0, within_s)
    while not all(network.site_status(name).ready for name in network.site_urls):
        if time.monotonic() > deadline:
            raise RuntimeError("a site is not ready again")
        time.sleep(0.1)


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    names = ("requests", "open_at_kills", "failed", "compared", "different", "dark_s")
    firsts = ("calm_worst_first_token_s", "worst_first_token_s", "worst_without_pauses_s", "is_in_time")
    titles = (
        "requests",
        "open at kills",
        "failed",
        "compared",
        "other tokens",
        "dark s",
        "first token s, calm",
        "worst",
        "without pauses",
        "in time",
    )
    table = Table("setting", "s apart", *titles, box=None, header_style="bold")
    for row in rows:
        table.add_row(row["setting"], f"{row['gap_s']:g}", *(str(row[name]) for name in (*names, *firsts)))
    for setting, gap, failed, dark in PUBLISHED:
        table.add_row(setting, gap, "", "", failed, "", "", dark, style="dim")
    console.print(table)
    for row in rows:
        if row["first_failure"] is not None:
            console.print(
                f"{row['setting']}, {row['gap_s']:g} s apart: {row['first_failure']}", soft_wrap=True, markup=False
            )


def plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draw, for each run, the seconds in which clients got tokens, and the pauses of its sites."""
    drawn = []
    for row in rows:
        tokens = merged([(at_s, at_s + 1.0) for at_s in row["tokens_at"]])
        spans = [("tokens arrive", *span) for span in tokens] + [
            ("a site has no engine host", *span) for span in row["pauses"]
        ]
        bars = tuple(Bar(name, 1e3 * begin, 1e3 * end) for name, begin, end in spans)
        title = f"{row['setting']}, {row['gap_s']:g} s apart"
        drawn.append(Row(title, max(bar.ended_ms for bar in bars), bars))
    return svg("Three engine hosts killed", drawn)


if __name__ == "__main__":
    raise SystemExit(main())

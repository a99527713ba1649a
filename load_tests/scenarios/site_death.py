"""The effect of a site's death on open streams. `make bench-site-death` runs it.

python -m load_tests.scenarios.site_death

Three sites on this machine get the same requests once undisturbed and once per fault. Each stream must end with exactly the tokens of its undisturbed
run. The record counts disturbed, continued and lost streams, and the pauses of disturbed ones. A pause is the longest gap between two events of a
stream after the fault. It includes the work of other streams, if there are few cores, and for a frozen site the time until its probes fail.
"""

import argparse
import asyncio
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import aiohttp
import msgspec
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from pilotlight.wire.hop.status import RouterStatus, SiteView
from pilotlight.wire.sse import EventDecoder

SUBJECTS = ("a fox", "a boat", "a lamp", "snow", "the sea", "a tree", "a clock", "rain")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
STORY = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "lines": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["title", "lines"],
}
COUNTER = re.compile(r"^pilotlight_router_streams_(disturbed|continued|lost)_total\{.*\} ([0-9.e+]+)$", re.MULTILINE)
Fault = Callable[[LocalNetwork, str], None]  # injects a fault into the site of this name


@dataclass
class Heard:
    """One stream as its client received it."""

    site: str = ""
    text: dict[int, str] = field(default_factory=dict)  # by index of the choice, like `calls`, `finish` and `tokens`
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)  # set if log-probabilities were requested
    usage: tuple[int, int] | None = None
    names: set[tuple[str, int]] = field(default_factory=set)
    arrivals_s: list[float] = field(default_factory=list)
    is_done: bool = False
    error: str | None = None

    @property
    def answer(self) -> tuple[Any, ...]:
        return self.text, self.calls, self.finish, self.tokens, self.usage

    def pause_s(self, at_s: float) -> float | None:
        """Return the longest gap that ended after `at_s`; None if the stream had ended."""
        pairs = zip(self.arrivals_s, self.arrivals_s[1:], strict=False)
        return max((after - before for before, after in pairs if after > at_s), default=None)


def requests(count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return requests of many kinds, greedy and sampled.

    They use penalties, log-probabilities, several choices, tools, stop strings, a schema and a required call.
    """
    return [_request(i, max_tokens) for i in range(count)]


def _request(i: int, max_tokens: int) -> dict[str, Any]:
    told = f"Tell me a story about {SUBJECTS[i % len(SUBJECTS)]}."
    body: dict[str, Any] = {
        "model": "ember", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": max_tokens,
        "ignore_eos": True, "temperature": 0.9, "seed": i, "messages": [{"role": "user", "content": told}],
    }  # fmt: skip
    variants: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {},
        {"logprobs": True, "top_logprobs": 1},
        {"presence_penalty": 0.6, "repetition_penalty": 1.2},
        {"n": 2, "max_tokens": max_tokens // 2},
        {"stop": ["e s", "qqq"]},
        {
            "temperature": 0,
            "tools": [WEATHER],
            "messages": [{"role": "user", "content": "What is the weather in Lisbon?"}],
        },
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": STORY}},
            "ignore_eos": False,
        },
        {"tools": [WEATHER], "tool_choice": "required", "ignore_eos": False},
    )
    return {**body, **variants[i % len(variants)]}


async def listen(url: str, bodies: Sequence[dict[str, Any]], on_event: Callable[[list[Heard]], None]) -> list[Heard]:
    """Read all streams concurrently to their ends; call `on_event` with their state after each event."""
    heard = [Heard() for _ in bodies]
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=180)) as session:
        await asyncio.gather(
            *(hear(session, url, body, mine, lambda: on_event(heard)) for body, mine in zip(bodies, heard, strict=True))
        )
    return heard


async def hear(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], heard: Heard, on_event: Callable[[], None]
) -> None:
    decoder = EventDecoder()
    try:
        async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
            heard.site = answer.headers.get("x-pilotlight-site", "")
            if answer.status != 200:
                heard.error = (await answer.text())[:300]
                return
            async for chunk in answer.content.iter_any():
                for event in decoder.feed(chunk):
                    if event.is_done:
                        heard.is_done = True
                    elif event.data is not None:
                        take(heard, orjson.loads(event.data))
                        on_event()
    except (aiohttp.ClientError, TimeoutError) as error:
        heard.error = f"{type(error).__name__}: {error}"


def take(heard: Heard, fields: dict[str, Any]) -> None:
    heard.arrivals_s.append(time.perf_counter())
    if "error" in fields:
        heard.error = str(fields["error"])[:300]
        return
    heard.names.add((fields["id"], fields["created"]))
    if usage := fields.get("usage"):
        heard.usage = usage["prompt_tokens"], usage["completion_tokens"]
    for choice in fields["choices"]:
        number, delta = choice["index"], choice["delta"]
        heard.text[number] = heard.text.get(number, "") + (delta.get("content") or "")
        for call in delta.get("tool_calls") or ():
            calls = heard.calls.setdefault(number, [])
            calls += [""] * (call["index"] + 1 - len(calls))
            calls[call["index"]] += call["function"].get("name", "") + call["function"]["arguments"]
        for item in (choice.get("logprobs") or {}).get("content") or ():
            heard.tokens.setdefault(number, []).append(item["token"])
        if choice["finish_reason"] is not None:
            heard.finish[number] = choice["finish_reason"]


class Injection:
    """Injects a fault into the busiest site, after each stream's first and in all `after_events` events."""

    def __init__(self, network: LocalNetwork, fault: Fault, after_events: int) -> None:
        self.network = network
        self.fault = fault
        self.after_events = after_events
        self.struck: list[str] = []
        self.at_s = 0.0
        self._second: Fault | None = None

    def and_again(self, fault: Fault) -> "Injection":
        """Add a fault for another site. It is injected during recovery, as soon as a stream has continued."""
        self._second = fault
        return self

    def on_event(self, heard: list[Heard]) -> None:
        now = time.perf_counter()
        if not self.struck:
            started = all(mine.arrivals_s for mine in heard)
            if started and sum(len(mine.arrivals_s) for mine in heard) >= self.after_events:
                self._strike(self.fault, Counter(mine.site for mine in heard if not mine.is_done))
        elif self._second is not None and len(self.struck) == 1:
            first = [mine for mine in heard if mine.site == self.struck[0]]
            if any(mine.arrivals_s[-1] > self.at_s + 0.05 and now - mine.arrivals_s[-1] < 0.05 for mine in first):
                self._strike(self._second, self._streams_elsewhere())

    def _streams_elsewhere(self) -> "Counter[str]":
        """Count streams per site other than the first faulty one, both started and continued there."""
        return Counter({view.site: view.inflight for view in site_views(self.network) if view.site not in self.struck})

    def _strike(self, fault: Fault, sites: "Counter[str]") -> None:
        ((site, _),) = sites.most_common(1)
        fault(self.network, site)
        self.struck.append(site)
        if len(self.struck) == 1:
            self.at_s = time.perf_counter()


def kill(network: LocalNetwork, site: str) -> None:
    """Kill a site's runtime and engine with SIGKILL."""
    for process in _processes(network, site):
        process.kill()


def freeze(network: LocalNetwork, site: str) -> None:
    for process in _processes(network, site):
        process.suspend()


def drain(network: LocalNetwork, site: str) -> None:
    psutil.Process(network.pid(site)).send_signal(signal.SIGTERM)


def _processes(network: LocalNetwork, site: str) -> list[psutil.Process]:
    return [psutil.Process(network.pid(site)), psutil.Process(network.pid(site, "engine"))]


def thaw(network: LocalNetwork) -> None:
    for process in network.processes():
        with suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                process.resume()


def stream_counts(network: LocalNetwork) -> "Counter[str]":
    """Return the router's counts of disturbed, continued and lost streams."""
    with urllib.request.urlopen(f"{network.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    totals: Counter[str] = Counter()
    for name, value in COUNTER.findall(text):
        totals[name] += round(float(value))
    return totals


def site_views(network: LocalNetwork) -> tuple[SiteView, ...]:
    with urllib.request.urlopen(f"{network.url}/status", timeout=10) as answer:
        return msgspec.json.decode(answer.read(), type=RouterStatus).sites


def wait_until_healthy(network: LocalNetwork, timeout_s: float = 60.0) -> None:
    """Wait until the router reports every site healthy and idle, with cut requests cleaned up."""
    deadline = time.monotonic() + timeout_s
    while True:
        views = site_views(network)
        if all(view.state == "healthy" and view.status is not None and not view.status.inflight for view in views):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"not healthy after {timeout_s:g} s: {[(view.site, view.state) for view in views]}")
        time.sleep(0.1)


FAULTS: dict[str, tuple[Fault, Fault | None]] = {
    "kill": (kill, None),
    "freeze": (freeze, None),
    "drain": (drain, None),
    "kill, and another during recovery": (kill, kill),
}


def disturb(
    network: LocalNetwork, fault: str, bodies: Sequence[dict[str, Any]], after_events: int
) -> tuple[list[Heard], dict[str, Any]]:
    """Run under one fault; return the results and the router's counts."""
    wait_until_healthy(network)
    before = stream_counts(network)
    first, second = FAULTS[fault]
    injection = Injection(network, first, after_events)
    if second is not None:
        injection.and_again(second)
    heard = asyncio.run(listen(network.url, bodies, injection.on_event))
    thaw(network)
    counted = stream_counts(network) - before
    hit = [mine.pause_s(injection.at_s) for mine in heard if mine.site in injection.struck]
    pauses_ms = sorted(1e3 * pause for pause in hit if pause is not None)
    return heard, {
        "streams": len(bodies),
        "sites_struck": len(injection.struck),
        **{name: counted[name] for name in ("disturbed", "continued", "lost")},
        "pause_ms": {"p50": percentile(pauses_ms, 50), "p99": percentile(pauses_ms, 99), "n": len(pauses_ms)},
    }


def percentile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return round(values[0], 1) if values else None
    return round(quantiles(values, n=100, method="inclusive")[percent - 1], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    console = Console()
    bodies = requests(options.streams, options.max_tokens)
    results: dict[str, Any] = {}
    with LocalNetwork() as network:
        undisturbed = asyncio.run(listen(network.url, bodies, lambda heard: None))
        after_events = sum(len(mine.arrivals_s) for mine in undisturbed) // 3
        for fault in FAULTS:
            with console.status(fault):
                heard, results[fault] = disturb(network, fault, bodies, after_events)
            same = sum(mine.answer == expected.answer for mine, expected in zip(heard, undisturbed, strict=True))
            results[fault]["same_tokens"] = same
    show(console, results)
    console.print(f"Record: {write_record('site-death', results)}", soft_wrap=True)


def show(console: Console, results: dict[str, Any]) -> None:
    names = ("streams", "same_tokens", "disturbed", "continued", "lost")
    table = Table("fault", *names, "pause p50 ms", "p99 ms", box=None, header_style="bold")
    for fault, result in results.items():
        pause = result["pause_ms"]
        table.add_row(fault, *(str(result[name]) for name in names), str(pause["p50"]), str(pause["p99"]))
    console.print(table)


if __name__ == "__main__":
    main()

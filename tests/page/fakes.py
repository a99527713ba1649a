"""Fake sources of the page: networks that exist only as figures."""

from collections.abc import Iterable

from pilotlight.page.source import Counts, Decision, Move, SiteRow, TimeHistogram
from pilotlight.wire.hop.status import FunctionsStatus, FunctionStatus, ModelStatus, Place, ProcessStatus

NO_TIMES = TimeHistogram((10.0, 100.0), (0, 0, 0))
HERE = Place("Amsterdam", 52.3, 4.8)


def counts(**fields: object) -> Counts:
    none = {"requests": {}, "tokens": 0, "prompt_tokens": 0, "cached_tokens": 0, "first_token": NO_TIMES, "token_gaps": NO_TIMES}  # fmt: skip
    return Counts(**none | fields)


class ToldSource:
    """A source that returns the given figures."""

    def __init__(self, rows: Iterable[SiteRow] = (), name: str = "router") -> None:
        self.name, self.place, self.version = name, HERE, "1.0"
        self.rows = tuple(rows)
        self.told = counts()
        self.all_moves: tuple[Move, ...] = ()
        self.all_decisions: tuple[Decision, ...] = ()

    def counts(self) -> Counts:
        return self.told

    def sites(self) -> tuple[SiteRow, ...]:
        return self.rows

    def moves(self) -> tuple[Move, ...]:
        return self.all_moves

    def decisions(self) -> tuple[Decision, ...]:
        return self.all_decisions


def row(name: str, text: str = "", **fields: object) -> SiteRow:
    """Return the row of a healthy site. `text` replaces every text in it, and `fields` replace its fields."""
    model = ModelStatus(
        text or "ember", "device", detail=text, aliases=(text,) if text else (), kv_blocks_total=10, kv_blocks_free=4
    )
    process = ProcessStatus("engine", 1, url=text or "http://here", device=text or "cpu")
    functions = FunctionsStatus(1, text, (FunctionStatus(text or "hello"),))
    made = {
        "state": "healthy", "version": text or "1.0", "detail": text, "place": Place(text or "Here", 10.0, 10.0),
        "models": (model,), "processes": (process,),
    }  # fmt: skip
    return SiteRow(name, **{"functions": functions, "rtt_ms": 1.0, "max_inflight": 8, **made, **fields})

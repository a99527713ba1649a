"""The record of clients: results against a router and a site, with the reasons of failures."""

from collections.abc import Iterable

from load_tests.records import Record

MARKS = {"works": "yes", "fails": "**no**: {}", "none": "\u2013: {}"}
LONGEST = 160  # characters shown of a reason


def libraries(results: Record) -> Iterable[list[str]]:
    return _rows(results["libraries"])


def rerankers(results: Record) -> Iterable[list[str]]:
    return _rows(results["rerankers"])


def ollama(results: Record) -> Iterable[list[str]]:
    return _rows(results["ollama"])


def deciders(results: Record) -> Iterable[list[str]]:
    return _rows(results["deciders"])


def edits(results: Record) -> Iterable[list[str]]:
    return _rows(results)


def generators(results: Record) -> Iterable[list[str]]:
    return _rows(results["generators"])


def _rows(found: Record) -> Iterable[list[str]]:
    checks = list(dict.fromkeys(check for client in found.values() for check in client["checks"]))
    yield ["client", "version", *checks]
    for name, client in found.items():
        if not client["checks"]:
            yield [name, "", f"**no**: {_line(client['reason'])}", *[""] * (len(checks) - 1)]
            continue
        cells = (client["checks"].get(check, {"verdict": "none", "reason": "not asked"}) for check in checks)
        yield [name, client["version"], *(MARKS[cell["verdict"]].format(_line(cell["reason"])) for cell in cells)]


def _line(reason: str) -> str:
    line = " ".join(reason.split()).replace("|", "\\|")
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}..."

"""The records of installations, of upgrades and rotations under load, and of backups."""

from collections.abc import Iterable

from load_tests.records import Record

CLIENTS = ("streams", "calls", "kept", "connections", "refused", "lost")


def bare_machines(results: Record) -> Iterable[list[str]]:
    yield ["", "Python", "install, s", "installed, MiB", "first chat, s", "first answer of a function, s"]
    for name, found in results.items():
        yield [name, *(_text(found.get(key)) for key in ("python", "install_s", "mib", "chat_s", "function_s"))]


def maintenance(results: Record) -> Iterable[list[str]]:
    yield [
        f"{results['streams']} streams at once",
        "streams",
        "calls",
        "stored responses",
        "connections",
        "refused",
        "lost",
    ]
    for part in ("upgrade", "rotation"):
        for phase, counts in results.get(part, {}).items():
            yield [phase, *(f"{counts.get(kind, 0):,}" for kind in CLIENTS)]


def backup(results: Record) -> Iterable[list[str]]:
    before, missing = results["acknowledged_before_the_mark"], results["missing"]
    yield [
        f"{results['writes_per_s']:g} writes per second",
        "acknowledged before the mark",
        "missing",
        "torn or doubled",
    ]
    for kind, count in before.items():
        yield [kind, f"{count:,}", str(missing[kind]), ""]
    yield [
        "all",
        f"{sum(before.values()):,}",
        str(sum(missing.values())),
        str(len(results["torn"]) + len(results["twice_in_the_ledger"])),
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)

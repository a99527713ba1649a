"""The records of cold starts and of over-commit."""

from collections.abc import Iterable

from load_tests.records import Record

CLOCKS = {
    "a": "(a) nothing runs, the checkpoint is not in the page cache",
    "b": "(b) nothing runs, the checkpoint is in the page cache",
    "c": "(c) the model sleeps in host memory",
    "d": "(d) the same, and another model must be put to sleep first",
    "e": "(e) the engine host is killed under a stream",
    "e0": "(e) the same, without a standby",
}


def clocks(results: Record) -> Iterable[list[str]]:
    """Show a line per clock and a column per size; then lines of the peers and of a memory copy."""
    sizes = results["sizes"]
    yield ["ms to the first token", *(f"{name}, {size['weights_bytes'] / 1e6:,.0f} MB" for name, size in sizes.items())]
    for clock, words in CLOCKS.items():
        measured = [size["clocks"].get(clock) for size in sizes.values()]
        if any(measured):
            yield [words, *("-" if one is None else f"{one['ms']['median']:,.0f}" for one in measured)]
    for name in sorted({name for size in sizes.values() for name in size["peers"]}):
        found = [size["peers"].get(name, {}) for size in sizes.values()]
        yield [f"(b) {name}", *(f"{one['ms']['median']:,.0f}" if "ms" in one else "-" for one in found)]
    yield ["one copy of the weights in memory", *(f"{size['copy_ms']:,.1f}" for size in sizes.values())]


def overcommit(results: Record) -> Iterable[list[str]]:
    sides = [results["always_awake"], results["over_committed"]]
    yield [f"{results['models']} models", "all awake", f"room for {results['share']:.0%} of their weights"]
    yield ["requests answered", *(f"{side['answered']} of {results['requests']}" for side in sides)]
    for name in ("p50", "p90", "p99"):
        yield [f"first token {name}, ms", *(f"{side['ttft_ms'][name]:,.1f}" for side in sides)]
    yield ["wakes", *(str(side["wakes"]) for side in sides)]
    yield ["a model's last wake, median ms", *(f"{side['wake_ms_median']:,.1f}" for side in sides)]

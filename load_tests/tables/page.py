"""The records of the page."""

from collections.abc import Iterable

from load_tests.records import Record


def first_minute(results: Record) -> Iterable[list[str]]:
    yield ["after `make up` is typed", "s"]
    for step in results["steps"]:
        yield [step["step"], f"{step['at_s']:.1f}"]

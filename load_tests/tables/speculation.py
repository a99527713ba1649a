"""The record of the gains and costs of drafts."""

from collections.abc import Iterable

from load_tests.bars import Group, draw
from load_tests.records import Record

_FEWEST_CHECKED = 30  # fewest drafts of a kind for which the rate is shown


def workloads(results: Record) -> Iterable[list[str]]:
    yield ["", "times as fast", "range", "n", "tokens a check"]
    for name, found in results["workloads"].items():
        length = results["drafters"][name]["acceptance_length"]
        yield [name, *_ratio(found["decode_ratio"]), "-" if length is None else f"{length:.2f}"]
    for name, found in results["mixed"].items():
        yield [name, *_ratio(found["answer_ratio"]), ""]
    replayed = results["replay"]
    for name, found in replayed.items():
        if isinstance(found, dict):
            yield [
                f"{replayed['shape']} shape, {name}",
                *_ratio(found["decode_ratio"]),
                f"{found['acceptance_length']:.2f}",
            ]


def steps(results: Record) -> Iterable[list[str]]:
    yield ["rows of a step", "predicted, ms", "actual, ms", "n"]
    for name, by_rows in results["steps"].items():
        for rows, found in by_rows.items():
            predicted, actual = found["predicted_ms"], found["actual_ms"]
            yield [f"{name}: {rows}", f"{predicted['median']:.2f}", f"{actual['median']:.2f}", str(actual["n"])]


def rates(results: Record) -> str:
    """Draw the share of correct drafts, by workload and kind."""
    groups = []
    for name, found in results["drafters"].items():
        often = {kind: one["rate"] for kind, one in found["kinds"].items() if one["checked"] >= _FEWEST_CHECKED}
        if often:
            groups.append(Group(name, often))
    return draw("Share of correct drafts among those verified after correct ones", groups)


def _ratio(spread: Record) -> list[str]:
    return [f"{spread['median']:.2f}", f"{spread['min']:.2f} to {spread['max']:.2f}", str(spread["n"])]

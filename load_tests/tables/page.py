"""The records of the web page: a newcomer's first minute, an operator's steps, and the page's cost."""

from collections.abc import Iterable

from load_tests.records import Record


def first_minute(results: Record) -> Iterable[list[str]]:
    yield ["after `make up` is typed", "s"]
    for step in results["steps"]:
        yield [step["step"], f"{step['at_s']:.1f}"]


def operate(results: Record) -> Iterable[list[str]]:
    yield ["step", "clicks", "s"]
    for step in results["steps"]:
        yield [step["step"], str(step["clicks"]), f"{step['seconds']:.1f}"]
    yield ["all of it", str(results["clicks"]), f"{results['seconds']:.1f}"]


def cost(results: Record) -> Iterable[list[str]]:
    yield ["measure", "found"]
    yield ["first paint with an empty browser cache, median", f"{results['first_paint_ms']['median']:.0f} ms"]
    yield ["its files, compressed", f"{results['bytes']['compressed'] / 1000:.0f} kB"]
    router = results["router"]
    yield [f"router's CPU time for {router['pages']} open pages", f"{100 * router['cores_for_ten']:.2f} % of a core"]
    yield [f"router's memory over {router['minutes']:g} minutes", f"{router['mib_an_hour']:+.2f} MiB an hour"]
    heap = results["heap_mib"]
    yield [
        "a page's heap after 1,000 and 11,000 updates",
        f"{heap['after_1000']:.2f} and {heap['after_11000']:.2f} MiB",
    ]

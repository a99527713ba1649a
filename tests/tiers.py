"""The cost of a test as a mark by which `make` selects tests, and samples of long tables of cases.

There are three tiers. A `unit` test (no mark) starts no process and opens no socket. A `process` test may do both. A `network` test starts several
sites, a browser or a database server. A test or a module has the mark `pytest.mark.process` or `pytest.mark.network`, or uses a fixture that depends
on `process_tier` or `network_tier`. There is no list to maintain: a unit test that starts a process or opens a socket fails, and the error names the
line. Two more marks go with any tier: a `long` test computes or waits for more than about half a second, and `smoke` marks the tests of the network
tier that `make test` runs: those that most changes can break.

`--sample K` keeps at most K cases of each test function, and K / 4 of a `long` one. The table of cases is divided into as many equal parts, and one
case of each part is drawn. The same `--seed` draws the same cases; without `--sample` all run.
"""

import gc
import random
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Generator, Iterable, Sequence
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[1])
OPENING = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "socket.bind": "binds a socket",
    "socket.connect": "connects a socket",
}
# Processes that the first test starts and all tests of a process share: the child that reads checkpoint files, and git, for the commit in records.
SHARED = ("engine/api/guarded_pool.py", "load_tests/records.py")


class Watch:
    """Records the processes that the running unit test starts and the sockets that it opens.

    Threads that ran before the test are ignored.
    """

    def __init__(self) -> None:
        self.seen: list[str] | None = None  # None while no unit test runs
        self._others: set[int | None] = set()
        sys.addaudithook(self._hear)

    def start(self) -> None:
        here = threading.get_ident()
        self._others = {thread.ident for thread in threading.enumerate() if thread.ident != here}
        self.seen = []

    def stop(self) -> None:
        self.seen = None

    def _hear(self, event: str, _arguments: object) -> None:
        if self.seen is None or (what := OPENING.get(event)) is None:  # `seen` first: at exit Python clears this module
            return
        if threading.get_ident() not in self._others:
            place = _place(traceback.extract_stack())
            if not place.removeprefix("pilotlight/").startswith(SHARED):
                self.seen.append(f"{what} in {place}")


def _place(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return file and line of the innermost frame in this project's code."""
    own = [frame for frame in stack if frame.filename.startswith(ROOT) and frame.filename != __file__]
    return f"{own[-1].filename.removeprefix(ROOT + '/')}:{own[-1].lineno}" if own else "a library's thread"


WATCH = Watch()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--sample", type=int, metavar="K", help="keep at most K cases of each test function")
    group.addoption("--seed", default="0", help="the seed of the draw of --sample")


@pytest.fixture(scope="session")
def process_tier() -> None:
    """Mark tests whose fixtures start a process or open a socket."""


@pytest.fixture(scope="session")
def network_tier() -> None:
    """Mark tests whose fixtures start several sites, a browser or a database server."""


def tier_of(item: pytest.Item) -> str:
    fixtures = getattr(item, "fixturenames", ())
    for tier in ("network", "process"):
        if f"{tier}_tier" in fixtures or item.get_closest_marker(tier) is not None:
            return tier
    return "unit"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    for item in items:
        tier = tier_of(item)
        if item.get_closest_marker(tier) is None:
            item.add_marker(tier)
    yield
    if config.option.sample is not None:
        kept = sample(items, config.option.sample, config.option.seed)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def sample(items: Iterable[pytest.Item], most: int, seed: str) -> set[pytest.Item]:
    """Draw at most `most` cases of each function, or `most // 4` of a long one: one from each of as many equal parts of its table."""
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    kept: set[pytest.Item] = set()
    for name, cases in functions.items():
        number = min(len(cases), max(1, most // 4) if cases[0].get_closest_marker("long") is not None else most)
        draw = random.Random(f"{seed} {name}")
        kept.update(
            cases[draw.randrange(len(cases) * k // number, len(cases) * (k + 1) // number)] for k in range(number)
        )
    return kept


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.sample is not None:
        terminalreporter.write_line(
            f"At most {config.option.sample} cases of each test function, drawn by SEED={config.option.seed}."
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    if item.get_closest_marker("unit") is not None:
        WATCH.start()
    yield


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    yield
    if WATCH.seen:
        pytest.fail(
            f"a unit test {'; '.join(sorted(set(WATCH.seen)))}: mark it `process`, or let its fixture ask for "
            "`process_tier` (tests/tiers.py)",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage during imports, and leave what is imported out of later collections, so that one takes less than a millisecond."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    """Collect garbage after each test, so that a file or a connection left open fails the test that opened it, and none that runs later.

    At the end of a file leave what its tests imported and cached out of later collections.
    """
    WATCH.stop()
    yield
    gc.collect()
    if nextitem is None or nextitem.path != item.path:
        gc.freeze()

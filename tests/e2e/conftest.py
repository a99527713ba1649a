"""A network of processes for the tests of this folder: a router, three sites and three engine hosts, as `pilotlight up` starts them.

PILOTLIGHT_SERVER chooses their HTTP server. Every test of this folder must pass with each server (`make test-servers`).
"""

from collections.abc import Callable, Iterator

import psutil
import pytest

from load_tests.local_network import LocalNetwork

# A setting for tests that need no standby host: to prepare one takes two seconds of a core when its site becomes idle.
NO_STANDBY = "standby = false"


@pytest.fixture(scope="session", autouse=True)
def _tier(network_tier: None) -> None:
    """Put every test of this folder into the tier `network`."""


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(engine_settings=NO_STANDBY) as running:
        yield running


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], None]:
    """Return a function that waits for an effect of another process, and fails with `what` after a minute.

    Only a failing test reaches the limit.
    """
    import time

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60.0
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within a minute: {what}"
            time.sleep(0.02)

    return wait


def tree_of(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False

"""A real network for the tests of this folder: router, three sites, three engine hosts, as `pilotlight up` starts them.

PILOTLIGHT_SERVER names the HTTP server of all of them; every test of this folder passes under each (`make test-servers`).
"""

from collections.abc import Callable, Iterator

import psutil
import pytest

from load_tests.local_network import LocalNetwork

# For tests that are not about standby hosts: each costs two seconds of a core as soon as a site is idle.
NO_STANDBY = "standby = false"


@pytest.fixture(scope="session", autouse=True)
def _tier(network_tier: None) -> None:
    """Every test of this folder is of the tier `network`."""


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(engine_settings=NO_STANDBY) as running:
        yield running


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], None]:
    """Wait for an effect of another process; fail with `what` after a minute.

    The limit only ends a failing test.
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

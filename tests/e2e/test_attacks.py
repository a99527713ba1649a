"""Attacks on a running network: each gets a specific error or a normal answer, other clients are served, and memory stays bounded."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress

import psutil
import pytest

from load_tests.attacks import CASES, MIB, Attack, Neighbour, ask
from load_tests.local_network import LocalNetwork
from pilotlight.sites.config import SERVER_ENV
from tests.e2e.conftest import NO_STANDBY

MAY_GROW_MIB = 256  # most memory that each process may gain
WAIT_MS = 2_000.0  # longest wait of other clients on a busy machine; without the defences they wait 8 s and more


OWN_SERVER = (
    "HTTP/2.0 in a request line",
    "HTTP/2 with prior knowledge",
)  # attacks on our own server only: stock servers ignore the first and support the second


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(num_sites=1, engine_settings=NO_STANDBY) as running:
        yield running


@pytest.mark.parametrize("attack", CASES, ids=lambda attack: attack.name)
def test_an_attack_is_refused_and_its_neighbours_are_served(network: LocalNetwork, attack: Attack) -> None:
    if attack.name in OWN_SERVER and os.environ.get(SERVER_ENV, "own") != "own":
        pytest.skip("a malformed request is refused by the server that owns the socket")
    request = attack.request(network.url.removeprefix("http://"))
    site = network.site_urls["ams1"]
    before = _rss_mib(network)

    async def strike() -> tuple[list[int], list[float]]:
        async with Neighbour(network.url) as router, Neighbour(site) as beside:
            answers = await asyncio.gather(*(ask(network.url, request) for _ in range(3)))
        return list(answers), router.waits_ms + beside.waits_ms

    answers, waits_ms = asyncio.run(strike())
    assert set(answers) <= attack.answers
    assert max(waits_ms, default=0.0) < WAIT_MS
    for process, mib in before.items():
        assert _rss_mib(network).get(process, 0.0) < mib + MAY_GROW_MIB, process


def _rss_mib(network: LocalNetwork) -> dict[psutil.Process, float]:
    found = {}
    for process in network.processes():
        with suppress(psutil.NoSuchProcess):
            found[process] = process.memory_info().rss / MIB
    return found

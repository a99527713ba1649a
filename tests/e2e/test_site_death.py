"""Thirty-six streams over three sites, one of which dies, freezes or drains. Each stream has the same tokens as without the fault (invariants I1, I3
and I8).
"""

import asyncio
from collections.abc import Iterator

import pytest

from load_tests.local_network import LocalNetwork
from load_tests.scenarios.site_death import FAULTS, Heard, disturb, listen, requests, stream_counts
from tests.e2e.conftest import NO_STANDBY

BODIES = requests(36, max_tokens=96)  # long enough that all are open together


@pytest.fixture(scope="module")
def network() -> Iterator[LocalNetwork]:
    with LocalNetwork(engine_settings=NO_STANDBY) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(network: LocalNetwork) -> list[Heard]:
    heard = asyncio.run(listen(network.url, BODIES, lambda heard: None))
    assert all(mine.is_done and mine.error is None for mine in heard), [mine.error for mine in heard]
    assert not stream_counts(network).total()
    return heard


# Kill and drain are marked slow, as tests/edge_router/test_continuation.py tests both without processes.
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=pytest.mark.slow) if fault in ("kill", "drain") else fault for fault in FAULTS]
)
def test_no_stream_notices(network: LocalNetwork, undisturbed: list[Heard], fault: str) -> None:
    after_events = sum(len(mine.arrivals_s) for mine in undisturbed) // 8
    heard, result = disturb(network, fault, BODIES, after_events)
    assert result["sites_struck"] == (1 if FAULTS[fault][1] is None else 2)
    assert result["disturbed"] >= 3  # few: on a busy machine many streams have ended by then
    assert (result["continued"], result["lost"]) == (result["disturbed"], 0)
    for body, mine, expected in zip(BODIES, heard, undisturbed, strict=True):
        assert mine.error is None, mine.error
        assert mine.is_done
        assert mine.answer == expected.answer, body
        assert len(mine.names) == 1

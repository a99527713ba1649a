"""Reading a chain of blocks into the host tier: a late or lost source leaves no block pinned, and no block is unpinned twice."""

from typing import Any, cast

import pytest

from pilotlight.engine.kv.tiers.tier_read import TierRead


class Host:
    def __init__(self) -> None:
        self.unpinned: list[Any] = []

    def unpin(self, slots: list[Any]) -> None:
        self.unpinned += slots


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def read(host: Host) -> TierRead:
    made = TierRead(cast("Any", host), [b"a", b"b", b"c"], 16)
    made.add(cast("Any", "first"), is_new=True)
    made.add(cast("Any", "second"), is_new=False)
    return made


def test_arrived_blocks_belong_to_their_taker(read: TierRead, host: Host) -> None:
    assert read.num_blocks == 0, "blocks count only after the end of the read"
    read.finish()
    assert (read.num_blocks, read.num_read) == (2, 1)
    assert read.take() == ["first", "second"]
    read.cancel()
    assert (read.take(), host.unpinned) == ([], [])


def test_blocks_that_arrive_too_late_for_their_taker_are_unpinned_once(read: TierRead, host: Host) -> None:
    assert read.take() == []
    assert host.unpinned == [], "the source's thread still writes to them"
    read.finish()
    assert host.unpinned == ["first", "second"]
    read.cancel()
    assert len(host.unpinned) == 2


def test_a_read_cancelled_after_its_end_is_unpinned_once(read: TierRead, host: Host) -> None:
    read.finish()
    read.cancel()
    read.cancel()
    assert host.unpinned == ["first", "second"]
    assert read.take() == []

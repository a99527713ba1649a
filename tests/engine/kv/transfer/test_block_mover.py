"""Copies between a device and the host tier, some of which fail."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.transfer.block_mover import BlockMover, BlockStore
from tests.engine.kv.tiers.test_host_tier import SIZE, STRIDE, content, name, put, read


class Copier:
    """A copier that fails at the first try and succeeds at the second."""

    store_bytes = fetch_bytes = 1 << 20
    map = staticmethod(map)

    def __init__(self) -> None:
        self.tries = 0

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: Any) -> None:
        self.tries += 1
        if self.tries == 1:
            raise RuntimeError("the device is gone")
        for block, memory in zip(blocks, into, strict=True):
            memory[:] = content(block)


def test_a_copy_that_fails_leaves_no_room_taken(tmp_path: Path) -> None:
    tier, copied = HostTier.open(tmp_path / "tier", 2 * STRIDE), list[int]()
    mover = BlockMover(tier, lambda name: None, cast("Any", Copier()), SIZE)
    stores = [BlockStore(n, name(n), None) for n in range(2)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        mover.store(stores, lambda: copied.append(1))
    assert (copied, [read(tier, n) for n in range(2)]) == ([], [None, None])
    mover.store(stores, lambda: copied.append(2))
    assert (copied, [read(tier, n) for n in range(2)]) == ([2], [content(0), content(1)])
    tier.close()


class Filling:
    """A fake device memory that records fetched blocks, and runs an action after each batch."""

    store_bytes = fetch_bytes = 1 << 20
    map = staticmethod(map)

    def __init__(self) -> None:
        self.filled: dict[int, bytes] = {}
        self.behind: list[Callable[[], None]] = []

    def mark(self) -> None:
        return None

    def fetch(self, blocks: Sequence[int], views: Sequence[memoryview], mark: Any) -> None:
        self.filled |= {block: bytes(view) for block, view in zip(blocks, views, strict=True)}
        if self.behind:
            self.behind.pop(0)()


def test_a_fetch_fills_blocks_in_order_until_it_is_cancelled_and_not_one_more(tmp_path: Path) -> None:
    tier, device = HostTier.open(tmp_path / "tier", 10 * STRIDE), Filling()
    mover = BlockMover(tier, lambda name: None, cast("Any", device), SIZE)
    mover.fetch_batch = 2
    for n in range(5):
        put(tier, n)
    whole = mover.begin_fetch([name(n) for n in range(5)], [7, 8, 9, 10, 11])
    mover.fetch(whole)
    assert device.filled == {7 + n: content(n) for n in range(5)}
    device.filled.clear()
    left = mover.begin_fetch([name(n) for n in range(5)], [7, 8, 9, 10, 11])
    device.behind.append(lambda: setattr(left, "is_cancelled", True))
    mover.fetch(left)
    assert (whole.num_blocks, left.num_blocks, sorted(device.filled)) == (5, 2, [7, 8])
    assert tier.num_pinned == 5
    for fetch in (whole, left):
        assert not fetch.is_done
        mover.end_fetch(fetch)
        assert fetch.is_done
    assert (tier.num_pinned, mover.num_lost) == (0, 0)
    tier.close()

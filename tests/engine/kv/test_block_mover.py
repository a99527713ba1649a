"""Copies between a device and the host tier, of which some fail."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from engine.kv.block_mover import BlockMover, BlockStore
from engine.kv.host_tier import HostTier
from tests.engine.kv.test_host_tier import SIZE, STRIDE, content, name, read


class Copier:
    """Copies at its second try."""

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
    mover = BlockMover(tier, [], cast("Any", Copier()), SIZE)
    stores = [BlockStore(n, name(n), None) for n in range(2)]
    with pytest.raises(RuntimeError, match="the device is gone"):
        mover.store(stores, lambda: copied.append(1))
    assert (copied, [read(tier, n) for n in range(2)]) == ([], [None, None])
    mover.store(stores, lambda: copied.append(2))
    assert (copied, [read(tier, n) for n in range(2)]) == ([2], [content(0), content(1)])
    tier.close()

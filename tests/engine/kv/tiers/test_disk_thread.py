"""The order of disk accesses if more blocks are computed than may be written: reads first, then blocks that were used again."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotlight.engine.kv.tiers.disk_thread import DiskThread
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from tests.engine.kv.tiers.test_host_tier import SIZE, name, put
from tests.waiting import until

BLOCKS_PER_S = 100


class Rig:
    """Ten blocks in host memory, and a disk that may be written at BLOCKS_PER_S blocks per second of a fake clock."""

    def __init__(self, directory: Path, disk: type[DiskTier] = DiskTier, **limits: int) -> None:
        self.now = 0.0
        self.directory = directory / "disk"
        self.host = HostTier.open(directory / "host", 1 << 20)
        for n in range(10):
            assert put(self.host, n)
        opened = disk.open(self.directory, 1 << 20)
        self.thread = DiskThread(opened, self.host, lambda: self.now, write_bytes_per_s=BLOCKS_PER_S * SIZE, **limits)
        self.thread.wait_until_idle(10)

    def offer(self, *numbers: int) -> None:
        for n in numbers:
            self.thread.offer(name(n))

    def written(self) -> list[int]:
        return [n for n in range(10) if name(n) in self.thread.disk]

    def close(self) -> None:
        self.thread.close()
        self.host.close()

    def pass_blocks(self, number: int) -> None:
        """Advance the clock by the time of `number` writes, and wait until these are done."""
        before = len(self.thread.disk)
        self.now += number / BLOCKS_PER_S + 1e-9
        until(lambda: len(self.thread.disk) == before + number)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def test_no_more_is_written_than_may_be(rig: Rig) -> None:
    rig.offer(*range(10))
    until(lambda: rig.written() == [0])
    assert not rig.thread.wait_until_idle(0.1)
    assert rig.written() == [0], "only one block may be written by now"
    rig.pass_blocks(3)
    assert rig.written() == [0, 1, 2, 3]


def test_what_was_used_again_goes_first(rig: Rig) -> None:
    rig.offer(*range(8))
    until(lambda: rig.written() == [0])
    rig.thread.note_reuse([name(6), name(7), name(0)])
    rig.pass_blocks(2)
    assert rig.written() == [0, 6, 7]
    rig.pass_blocks(1)
    assert rig.written() == [0, 1, 6, 7]


def test_what_was_dropped_is_written_once_it_is_used_again(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_writes=3)
    rig.offer(0)
    until(lambda: rig.written() == [0])
    rig.offer(1, 2, 3, 4, 5)
    assert rig.thread.num_dropped == 2
    rig.thread.note_reuse([name(5)])
    rig.pass_blocks(4)
    assert rig.written() == [0, 1, 2, 3, 5]
    assert rig.thread.wait_until_idle(10)
    rig.close()


def test_a_read_waits_for_no_bandwidth(rig: Rig) -> None:
    rig.offer(0, 1, 2)
    until(lambda: rig.written() == [0])
    rig.host.forget([name(0)])
    read = rig.thread.read([name(0)], SIZE)
    until(lambda: read.is_done)
    slots = read.take()
    assert len(slots) == 1
    rig.host.unpin(slots)
    assert rig.written() == [0]


def test_what_is_forgotten_is_not_written_and_an_end_hurries(rig: Rig) -> None:
    rig.offer(*range(5))
    until(lambda: rig.written() == [0])
    rig.thread.note_reuse([name(4)])
    rig.thread.forget([name(2), name(4)])
    assert rig.thread.num_dropped == 0
    rig.thread.close()
    rig.thread = DiskThread(DiskTier.open(rig.directory, 1 << 20), rig.host)
    assert rig.thread.wait_until_idle(10)
    assert rig.written() == [0, 1, 3]


class BrokenDisk(DiskTier):
    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        raise RuntimeError("a bug")


def test_a_read_that_fails_for_whatever_reason_leaves_its_slot_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path, BrokenDisk)
    chain = rig.thread.read([name(0), name(77)], SIZE)
    assert rig.thread.wait_until_idle(10)
    assert "a bug" in caplog.text
    assert (chain.is_done, chain.num_blocks) == (True, 1)
    rig.host.unpin(chain.take())
    assert rig.host.num_pinned == 0
    assert put(rig.host, 77)
    rig.close()

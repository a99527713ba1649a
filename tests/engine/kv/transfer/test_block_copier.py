"""Copies between a CUDA device and host memory, with a fake device: direct and staged copies, and their order."""

import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.transfer.block_copier import CpuBlockCopier, CudaBlockCopier, make_copier
from pilotlight.engine.kv.transfer.block_mover import BlockMover, BlockStore
from tests.engine.fake_copy_stream import FakeCopyStream
from tests.engine.fake_registrar import FakeRegistrar
from tests.waiting import until

BLOCK = mmap.PAGESIZE
NUM_BLOCKS = 16
PIECE = 4 * BLOCK


class Rig:
    """A cache of 16 blocks and 16 places in host memory, which is registered in pieces of 4 places."""

    def __init__(self) -> None:
        self.cache = torch.randint(0, 256, (NUM_BLOCKS, BLOCK), dtype=torch.uint8)
        self.map = mmap.mmap(-1, NUM_BLOCKS * BLOCK)
        self.host = torch.frombuffer(self.map, dtype=torch.uint8).view(NUM_BLOCKS, BLOCK)
        self.registrar = FakeRegistrar()
        self.registered = RegisteredMemory(self.host.view(-1), torch.device("cuda"), PIECE, registrar=self.registrar)
        self.stream = FakeCopyStream()
        self.copier = CudaBlockCopier(self.cache, self.registered, self.stream, buffer_bytes=2 * BLOCK)

    def register(self, num_pieces: int) -> None:
        self.registered.register(0, num_pieces * PIECE)
        until(lambda: len(self.registrar.registered) == num_pieces)
        self.registered.wait(60)

    def views(self, places: list[int]) -> list[memoryview]:
        return [memoryview(self.map)[place * BLOCK : (place + 1) * BLOCK] for place in places]

    def straight(self) -> int:
        """Return how many blocks were copied without staging."""
        cache, host = self.cache.data_ptr(), self.host.data_ptr()
        size = self.cache.nbytes
        return sum(
            copy[2] // BLOCK
            for copy in self.stream.copied
            if any(0 <= at - cache < size for at in copy[:2]) and any(0 <= at - host < size for at in copy[:2])
        )


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.registered.close()


BLOCKS, PLACES = [5, 2, 11, 3, 9, 14, 0], [1, 2, 0, 3, 9, 4, 15]


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 4])
def test_blocks_go_to_their_places_whatever_of_these_is_registered(rig: Rig, num_pieces: int) -> None:
    rig.register(num_pieces)
    rig.copier.store(BLOCKS, rig.views(PLACES), rig.copier.mark())
    assert torch.equal(rig.host[PLACES], rig.cache[BLOCKS])
    assert not rig.host[[5, 6, 7, 8]].any()
    reached = sum(place < num_pieces * 4 for place in PLACES)
    assert (rig.straight(), len(rig.stream.copied)) == (reached, len(PLACES))


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 4])
def test_blocks_come_from_their_places_whatever_of_these_is_registered(rig: Rig, num_pieces: int) -> None:
    rig.register(num_pieces)
    rig.host.random_()
    before = rig.cache.clone()
    rig.copier.fetch(BLOCKS, rig.views(PLACES), rig.copier.mark())
    assert torch.equal(rig.cache[BLOCKS], rig.host[PLACES])
    others = [block for block in range(NUM_BLOCKS) if block not in BLOCKS]
    assert torch.equal(rig.cache[others], before[others])
    assert rig.straight() == sum(place < num_pieces * 4 for place in PLACES)


def test_copies_of_registered_memory_start_after_the_mark_and_are_waited_for_once(rig: Rig) -> None:
    rig.register(4)
    for move in (rig.copier.store, rig.copier.fetch):
        rig.stream.events.clear()
        move(BLOCKS, rig.views(PLACES), "the mark")
        assert rig.stream.events == ["wait for the mark", *["copy"] * len(BLOCKS), "wait"]


def test_neighbours_on_both_sides_are_copied_at_once_within_a_piece(rig: Rig) -> None:
    rig.register(3)
    blocks, places = [7, 8, 9, 10, 1, 0, 3, 4, 12, 13, 14], [2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13]
    expected = [(7, 2, 2), (9, 4, 2), (1, 6, 1), (0, 7, 1), (3, 8, 1), (4, 10, 1), (12, 11, 1)]
    rig.copier.store(blocks, rig.views(places), "it")
    cache, host = rig.cache.data_ptr(), rig.host.data_ptr()
    straight = rig.stream.copied[: len(expected)]
    assert [((a - cache) // BLOCK, (b - host) // BLOCK, n // BLOCK) for b, a, n in straight] == expected
    assert torch.equal(rig.host[places], rig.cache[blocks])
    assert rig.straight() == 9, "the last two blocks must go through staging"


def test_a_buffer_is_emptied_while_the_device_fills_the_other_and_filled_once_it_was_copied(rig: Rig) -> None:
    rig.copier.store(BLOCKS, rig.views(PLACES), "it")
    assert "".join(event[0] for event in rig.stream.events[1:]) == "cccc" + "wcc" + "wc" + "ww" + "w"
    rig.stream.events.clear()
    rig.copier.fetch(BLOCKS, rig.views(PLACES), "it")
    assert "".join(event[0] for event in rig.stream.events[1:]) == "cccc" + "wcc" + "wc" + "w"


def test_unregistered_memory_goes_through_staging(rig: Rig) -> None:
    """An example is the memory in which the host joins the blocks of several ranks."""
    rig.register(4)
    places = [memoryview(bytearray(BLOCK)) for _ in BLOCKS]
    rig.copier.store(BLOCKS, places, "it")
    assert [bytes(place) for place in places] == [bytes(rig.cache[block].tolist()) for block in BLOCKS]
    alone = CudaBlockCopier(rig.cache, None, rig.stream)
    alone.fetch([7], [places[0]], "it")
    assert torch.equal(rig.cache[7], rig.cache[BLOCKS[0]])
    assert rig.straight() == 0


def test_what_is_being_copied_stays_registered_until_it_is(rig: Rig) -> None:
    rig.register(4)
    seen = []

    def release() -> None:
        rig.registered.release(0, PIECE)
        time.sleep(0.05)
        seen.append(len(rig.registrar.registered))

    rig.stream.on_wait = release
    rig.copier.fetch([1], rig.views([2]), "it")
    assert seen == [4]
    until(lambda: len(rig.registrar.registered) == 3)
    rig.stream.on_wait = lambda: None
    rig.copier.fetch([1], rig.views([2]), "it")
    assert rig.straight() == 1, "the second copy must go through staging"
    assert torch.equal(rig.cache[1], rig.host[2])


@pytest.mark.parametrize("num_pieces", [0, 4])
def test_a_device_that_fails_is_said_to_and_nothing_stays_in_use(rig: Rig, num_pieces: int) -> None:
    rig.register(num_pieces)
    rig.stream.num_until_failure = 3
    with pytest.raises(RuntimeError, match="the device is gone"):
        rig.copier.store(BLOCKS, rig.views(PLACES), "it")
    assert not rig.stream.queue, "a late copy would write to slots of other blocks"
    rig.registered.release(0, 4 * PIECE)
    until(lambda: not rig.registrar.registered)


def test_the_device_leaves_the_host_threads_and_a_cpu_does_not(rig: Rig) -> None:
    assert rig.copier.map(lambda n: n + 1, [1, 2]) == [2, 3]
    asked = []
    found = CpuBlockCopier(rig.cache).map(lambda n: asked.append(n) or n == 1, [1, 0, 1])
    assert not all(found)
    assert asked == [1, 0], "elements after a failure are skipped"


@pytest.mark.long
@pytest.mark.parametrize("size", [1 << 20, 64 << 10, 3 * BLOCK - 100])
def test_blocks_of_any_size_go_to_slots_and_back_before_and_after_their_registration(size: int) -> None:
    """A GPU copies if there is one, else a fake."""
    has_gpu = torch.cuda.is_available()
    stride, num_slots = -(-size // BLOCK) * BLOCK, 24
    registrar = None if has_gpu else FakeRegistrar()
    slots = SlotMemory(torch.device("cuda"), 4 * stride, registrar)
    cache = torch.randint(0, 256, (3 * num_slots, size), dtype=torch.uint8, device="cuda" if has_gpu else "cpu")
    whole = cache.clone()

    def move(tier: HostTier, first: int) -> None:
        """Store the blocks from `first` on, overwrite them, and fetch them again."""
        memory, names = tier.add_size(size), [bytes([first + i]) * 32 for i in range(num_slots)]
        copier = make_copier(cache, memory) if has_gpu else CudaBlockCopier(cache, memory, FakeCopyStream())
        mover = BlockMover(tier, lambda name: None, copier, size)
        blocks = range(first, first + num_slots)
        mover.store([BlockStore(b, name, mover.mark()) for b, name in zip(blocks, names, strict=True)])
        until(lambda: memory.covers(0, num_slots * stride))
        cache[first : first + num_slots] = 0xFF
        fetch = mover.begin_fetch(names, blocks)
        mover.fetch(fetch)
        mover.end_fetch(fetch)
        assert fetch.num_blocks == num_slots
        assert torch.equal(cache, whole)

    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        for _ in range(2):  # the second time the files exist already
            tier = HostTier.open(Path(directory) / "tier", num_slots * stride, memory=slots)
            move(tier, 0)
            move(tier, num_slots)  # reuses the slots of the first move
            slot = tier.reserve(b"other", BLOCK)  # takes the pages of the oldest slot
            assert slot is not None
            tier.abandon(slot)
            assert not tier.add_size(size).covers(0, num_slots * stride)
            move(tier, 2 * num_slots)  # to pages that are not registered yet
            tier.close()

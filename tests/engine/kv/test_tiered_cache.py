"""The access of one model to the tiers: copies that are overtaken, cancelled or fail, and the decision whether to copy."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch

from pilotlight.engine.api.protocol import BlockSource, SamplingParams
from pilotlight.engine.core.sequence import Sequence as EngineSequence
from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.cached_prefix import PrefixLookup
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.store.store_thread import StoreLookup
from pilotlight.engine.kv.tier_protocol import TRANSFER_TIMEOUT_S
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers.disk_thread import DiskThread
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead
from pilotlight.engine.kv.transfer.block_copier import CpuBlockCopier, CudaBlockCopier
from pilotlight.engine.kv.transfer.block_mover import BlockStore, HostFetch
from pilotlight.engine.kv.transfer.host_thread import HostThread
from tests.engine.fake_copy_stream import FakeCopyStream
from tests.engine.fake_registrar import FakeRegistrar
from tests.engine.kv.tiers.test_host_tier import name
from tests.waiting import until

BLOCK_SIZE = 4


BLOCK_BYTES = 3 * 2 * BLOCK_SIZE * 2 * 10 * 4


class SlowCopier(CpuBlockCopier):
    """A copier that can be held and can fail; `started` is set when a copy begins."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(cache)
        self.started = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.is_broken = False

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        self._pause()
        super().store(blocks, into, mark)

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        self._pause()
        super().fetch(blocks, source, mark)

    def hold_up(self) -> None:
        self.started.clear()
        self.may_go_on.clear()

    def _pause(self) -> None:
        self.started.set()
        assert self.may_go_on.wait(60)
        if self.is_broken:
            raise RuntimeError("the device is gone")


class SlowDisk(DiskTier):
    """A disk whose reads can be held."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def read(self, block_hash: bytes, into: memoryview) -> int | None:
        assert self.may_answer.wait(60)
        return super().read(block_hash, into)


class NoticedDiskThread(DiskThread):
    """A thread that calls `on_forget` before it forgets blocks."""

    on_forget: Callable[[], None] = staticmethod(lambda: None)

    def forget(self, hashes: Sequence[bytes]) -> None:
        self.on_forget()
        super().forget(hashes)


class Rig:
    def __init__(self, directory: Path, num_blocks: int = 64, max_writes: int = 512, **limits: int) -> None:
        self.bytes = BLOCK_BYTES
        self.cache = torch.zeros(num_blocks, self.bytes, dtype=torch.uint8)
        self.copier = SlowCopier(self.cache)
        self.host = HostTier.open(directory / "host", 40 * 4096)
        self.skipped_s = 0.0
        self.disk_tier = SlowDisk.open(directory / "disk", 1 << 20)
        self.disk = NoticedDiskThread(
            self.disk_tier, self.host, lambda: time.monotonic() + self.skipped_s, max_writes=max_writes
        )
        self.tiers = TieredCache(self.host, self.disk, self.copier, self.bytes, **limits)

    def fill(self, n: int) -> None:
        self.cache[n] = n + 1

    def store(self, numbers: Sequence[int], wait: bool = True) -> None:
        for n in numbers:
            self.fill(n)
            self.tiers.store(n, name(n))
        self.tiers.begin_stores(everything=True)
        if wait:
            assert self.tiers.wait_until_idle(10)

    def lookup(self, chain: list[bytes], with_disk: bool) -> tuple[int, int]:
        """Return how many blocks of a chain to fetch, and how many of these are on disk."""
        sequence = EngineSequence("s", [0] * (len(chain) * BLOCK_SIZE + 1), SamplingParams(1), b"", block_hashes=chain)
        sequence.num_disk_blocks = None if with_disk else 0
        prefixes = PrefixLookup(BlockPool(0), self.tiers, CacheGroups(BLOCK_SIZE, 1), shares_prefixes=True)
        prefix = prefixes.find_in_tiers(sequence, prefixes.find_cached(sequence))
        return prefix.num_blocks, prefix.num_behind

    def fetch(self, numbers: Sequence[int], blocks: Sequence[int]) -> HostFetch:
        fetch = self.tiers.fetch([name(n) for n in numbers], blocks)
        assert isinstance(fetch, HostFetch)
        return fetch

    def close(self) -> None:
        self.copier.may_go_on.set()
        self.tiers.close()
        self.disk.close()
        self.host.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def holds(cache: torch.Tensor, n: int) -> bool:
    return bool((cache == n + 1).all())


def test_what_is_stored_comes_back_elsewhere(rig: Rig) -> None:
    rig.store(range(10))
    assert rig.lookup([name(n) for n in range(12)], with_disk=False) == (10, 0)
    fetch = rig.fetch(range(10), range(20, 30))
    assert rig.tiers.wait_until_idle(10)
    assert fetch.is_done
    assert fetch.num_blocks == 10
    assert all(holds(rig.cache[20 + n], n) for n in range(10))
    assert not rig.cache[30:].any()


def test_a_step_begins_few_copies_but_for_another_host_that_waits(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stored_per_step_bytes=2 * BLOCK_BYTES)

    def stored_of(numbers: range) -> int:
        before = len(rig.host)
        for n in numbers:
            rig.fill(n)
            rig.tiers.store(n, name(n))
        rig.tiers.begin_stores(everything=False)
        assert rig.tiers.wait_until_idle(10)
        return len(rig.host) - before

    assert stored_of(range(5)) == 2
    rig.tiers.begin_hand_over("a")
    assert stored_of(range(5, 10)) == 3 + 5, "all new blocks, and the three left over"
    rig.tiers.end_hand_over("a")
    assert stored_of(range(10, 15)) == 5, "the last blocks of the hand-over"
    assert stored_of(range(15, 20)) == 2
    rig.close()


def test_a_block_that_is_larger_than_what_a_step_may_copy_has_a_step_of_its_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path, stored_per_step_bytes=BLOCK_BYTES - 1)
    for n in range(3):
        rig.fill(n)
        rig.tiers.store(n, name(n))
    for number in (1, 2, 3, 3):
        rig.tiers.begin_stores(everything=False)
        assert rig.tiers.wait_until_idle(10)
        assert len(rig.host) == number
    rig.close()


def test_a_block_that_is_reused_before_its_turn_is_not_stored(rig: Rig) -> None:
    rig.fill(0)
    rig.tiers.store(0, name(0))
    rig.tiers.drop(0)
    rig.tiers.begin_stores(everything=True)
    rig.copier.hold_up()
    rig.tiers.mover.store_batch = 4
    rig.store(range(1, 20), wait=False)
    assert rig.copier.started.wait(60)
    waiting = range(5, 20)
    for block in waiting:
        rig.tiers.drop(block)
        rig.cache[block] = -1
    rig.copier.may_go_on.set()
    assert rig.tiers.wait_until_idle(10)
    stored = [n for n in range(20) if name(n) in rig.host]
    assert stored == sorted(set(range(1, 20)) - set(waiting))
    assert 0 not in stored


def test_a_block_that_is_being_copied_is_not_given_up_before_it_is(rig: Rig) -> None:
    rig.copier.hold_up()
    rig.store([5], wait=False)
    assert rig.copier.started.wait(60)
    overwritten = threading.Event()

    def overwrite() -> None:
        rig.tiers.drop(5)
        rig.cache[5] = -1
        overwritten.set()

    thread = threading.Thread(target=overwrite)
    thread.start()
    assert not overwritten.wait(0.05)
    rig.copier.may_go_on.set()
    assert overwritten.wait(60)
    thread.join()
    assert rig.tiers.wait_until_idle(10)
    fetch = rig.fetch([5], [9])
    assert rig.tiers.wait_until_idle(10)
    assert fetch.num_blocks == 1
    assert holds(rig.cache[9], 5)


def test_after_a_cancel_nothing_is_written_any_more(rig: Rig) -> None:
    rig.store(range(8))
    rig.copier.hold_up()
    under_way, queued = rig.fetch(range(4), range(20, 24)), rig.fetch(range(4, 8), range(24, 28))
    assert rig.copier.started.wait(60)
    rig.tiers.cancel(queued)
    cancelling = threading.Thread(target=rig.tiers.cancel, args=[under_way])
    cancelling.start()
    rig.copier.may_go_on.set()
    cancelling.join(10)
    assert under_way.is_done
    assert queued.is_done
    rig.cache[20:28] = -7
    assert rig.tiers.wait_until_idle(10)
    assert (rig.cache[20:28] == -7).all()
    assert rig.host.num_pinned == 0


def test_bad_content_that_is_being_stored_is_forgotten_too(rig: Rig) -> None:
    rig.copier.hold_up()
    rig.store([1, 2], wait=False)
    assert rig.copier.started.wait(60)
    forgetting = threading.Thread(target=rig.tiers.forget, args=[[name(1)]])
    forgetting.start()
    rig.copier.may_go_on.set()
    forgetting.join(10)
    assert rig.tiers.wait_until_idle(10)
    assert name(1) not in rig.host
    assert name(2) in rig.host
    assert name(1) not in rig.disk.disk


def test_bad_content_that_a_disk_gives_back_meanwhile_is_forgotten_too(rig: Rig) -> None:
    rig.store([1])
    rig.host.forget([name(1)])

    def read_first() -> None:
        read = rig.tiers.read([name(1)])
        until(lambda: read.is_done)

    rig.disk.on_forget = read_first
    rig.tiers.forget([name(1)])
    assert name(1) not in rig.disk
    assert name(1) not in rig.host


def test_a_failed_step_calls_everything_off(rig: Rig) -> None:
    rig.store(range(6))
    owner = object()
    assert rig.tiers.swap_out(owner, [name(0)], [0], BLOCK_SIZE)
    rig.copier.hold_up()
    fetch = rig.fetch(range(6), range(20, 26))
    rig.store(range(30, 40), wait=False)
    assert rig.copier.started.wait(60)
    rig.copier.may_go_on.set()
    rig.tiers.reset()
    rig.cache.zero_()
    assert rig.tiers.wait_until_idle(10)
    assert not rig.cache.any()
    assert fetch.is_cancelled
    assert rig.tiers.load().num_pinned == 0
    assert not any(name(n) in rig.host for n in range(30, 40))
    assert rig.host.num_pinned == 0


def test_a_device_that_fails_ends_the_tiers_and_nothing_else(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.store(range(3))
    rig.copier.is_broken = True
    fetch = rig.fetch(range(3), range(20, 23))
    assert rig.tiers.wait_until_idle(10)
    assert fetch.is_done
    assert fetch.num_blocks == 0
    assert "continues without tiers" in caplog.text
    assert rig.lookup([name(0)], with_disk=True) == (0, 0)
    rig.store([7])
    assert name(7) not in rig.host
    assert rig.host.num_pinned == 0


def test_a_model_that_leaves_waits_for_the_copy_under_way(rig: Rig) -> None:
    thread = HostThread(rig.tiers.mover)
    rig.copier.hold_up()
    rig.fill(1)
    thread.store([BlockStore(1, name(1), rig.tiers.mover.mark())])
    assert rig.copier.started.wait(60)
    leaving = threading.Thread(target=thread.close)
    leaving.start()
    leaving.join(0.05)
    assert leaving.is_alive(), "its memory is still being read"
    rig.copier.may_go_on.set()
    leaving.join(10)
    assert not leaving.is_alive()
    assert name(1) in rig.host


def test_a_chain_comes_back_from_the_disk_and_a_damaged_block_ends_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(6))
    rig.close()
    for file in (tmp_path / "host").iterdir():
        file.unlink()
    (segment,) = (tmp_path / "disk").glob("segment-*.kv")
    damaged = bytearray(segment.read_bytes())
    damaged[4 * (64 + rig.bytes) + 100] ^= 1  # in the content of the fifth block
    segment.write_bytes(damaged)
    rig = Rig(tmp_path)
    assert rig.disk.wait_until_idle(10)
    chain = [name(n) for n in range(6)]
    assert rig.lookup(chain, with_disk=True) == (6, 6)
    assert rig.lookup(chain, with_disk=False) == (0, 0)
    owner = object()
    read = rig.tiers.read(chain)
    assert rig.disk.wait_until_idle(10)
    assert read.is_done
    assert rig.tiers.take_read(owner, read) == 4
    assert rig.tiers.load().num_pinned == 4
    assert rig.tiers.load().num_lost == 1
    assert rig.disk.disk.num_corrupt == 1
    fetch = rig.fetch(range(4), range(20, 24))
    rig.tiers.unpin(owner)
    assert rig.tiers.wait_until_idle(10)
    assert fetch.num_blocks == 4
    assert all(holds(rig.cache[20 + n], n) for n in range(4))
    cancelled = rig.tiers.read(chain)
    rig.tiers.cancel(cancelled)
    assert rig.disk.wait_until_idle(10)
    assert rig.host.num_pinned == 0
    rig.close()


def test_a_disk_that_does_not_answer_is_not_waited_for(rig: Rig) -> None:
    rig.store(range(3))
    rig.host.forget([name(n) for n in range(3)])
    rig.disk_tier.may_answer.clear()
    owner = object()
    read = rig.tiers.read([name(n) for n in range(3)])
    rig.skipped_s = TRANSFER_TIMEOUT_S
    assert not read.is_done
    rig.tiers.cancel(read)
    assert rig.tiers.take_read(owner, read) == 0
    chain = [name(n) for n in range(3)]
    assert rig.lookup(chain, with_disk=True) == (0, 0), "the next one does not begin to wait either"
    rig.disk_tier.may_answer.set()
    assert rig.disk.wait_until_idle(10)
    assert rig.lookup(chain, with_disk=True)[0] == 3
    assert rig.tiers.load().num_pinned == 0
    assert rig.host.num_pinned == 0


def test_a_damaged_block_of_the_host_tier_ends_the_fetch_before_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.store(range(5))
    rig.close()
    rig = Rig(tmp_path)  # blocks of an earlier process are checked when they are read
    slot = rig.host.pin(name(2), is_hit=False)
    assert slot is not None
    slot.memory[7] ^= 1
    rig.host.unpin([slot])
    fetch = rig.fetch(range(5), range(20, 25))
    assert rig.tiers.wait_until_idle(10)
    assert fetch.num_blocks == 2
    assert rig.tiers.load().num_lost == 1
    assert rig.host.num_corrupt == 1
    assert not rig.cache[22:].any()
    rig.close()


def test_a_swap_copies_what_is_missing_and_pins_it_until_it_is_let_go(rig: Rig) -> None:
    rig.store(range(3))
    for n in range(3, 6):
        rig.fill(n)
    rig.tiers.store(4, name(4))
    owner = object()
    assert rig.tiers.swap_out(owner, [name(n) for n in range(6)], range(6), 6 * BLOCK_SIZE)
    assert rig.tiers.wait_until_idle(10)
    rig.cache[:6] = -1
    for n in range(20, 60):
        slot = rig.host.reserve(name(n), rig.bytes)
        if slot is not None:
            slot.memory[:] = bytes(rig.bytes)
            rig.host.commit(slot, crc32(slot.memory))
            rig.host.unpin([slot])
    assert all(name(n) in rig.host for n in range(6))
    assert rig.tiers.load().num_pinned == 6
    fetch = rig.fetch(range(6), range(6))
    rig.tiers.unpin(owner)
    assert rig.tiers.wait_until_idle(10)
    assert fetch.num_blocks == 6
    assert all(holds(rig.cache[n], n) for n in range(6))
    assert rig.host.num_pinned == 0


def test_a_swap_does_not_wait_for_its_copies_and_keeps_nothing_of_what_is_used_again_before(rig: Rig) -> None:
    for n in range(20):
        rig.fill(n)
    owner, chain = object(), [name(n) for n in range(20)]
    rig.copier.hold_up()
    rig.tiers.mover.store_batch = 4
    assert rig.tiers.swap_out(owner, chain, range(20), 20 * BLOCK_SIZE)
    assert rig.copier.started.wait(60), "a thread copies"
    assert not any(block in rig.host for block in chain), "the engine's thread continues during the copy"
    used_again = [18, 19]
    for block in used_again:
        rig.tiers.drop(block)
        rig.cache[block] = 99
    rig.copier.may_go_on.set()
    assert rig.tiers.wait_until_idle(10)
    kept = [n for n in range(20) if name(n) in rig.host]
    assert kept == [n for n in range(20) if n not in used_again]
    assert rig.tiers.load().num_pinned == len(kept)
    fetch = rig.fetch(kept, range(30, 30 + len(kept)))
    assert rig.tiers.wait_until_idle(10)
    assert fetch.num_blocks == len(kept)
    assert all(holds(rig.cache[30 + i], n) for i, n in enumerate(kept))
    rig.tiers.unpin(owner)
    assert rig.tiers.load().num_pinned == 0


def test_a_sequence_that_continues_before_its_blocks_are_copied_leaves_no_pin(rig: Rig) -> None:
    for n in range(6):
        rig.fill(n)
    owner = object()
    rig.copier.hold_up()
    assert rig.tiers.swap_out(owner, [name(n) for n in range(6)], range(6), 6 * BLOCK_SIZE)
    assert rig.copier.started.wait(60)
    rig.tiers.unpin(owner)
    rig.copier.may_go_on.set()
    assert rig.tiers.wait_until_idle(10)
    assert all(name(n) in rig.host for n in range(6))
    assert rig.tiers.load().num_pinned == 0


def test_a_tier_slower_than_computing_is_passed_over_but_now_and_then_tried(rig: Rig) -> None:
    rig.store(range(4))
    chain = [name(n) for n in range(4)]
    rig.tiers.mover.fetch_rate.add(4 * rig.bytes, seconds=1.0)
    rig.tiers.note_prefill_rate(4 * BLOCK_SIZE / 2.0)  # computing the chain takes two seconds
    assert rig.lookup(chain, with_disk=True) == (4, 0)
    assert rig.tiers.swap_out("a", chain, range(4), 4 * BLOCK_SIZE)
    rig.tiers.unpin("a")
    rig.tiers.note_prefill_rate(4 * BLOCK_SIZE / 0.5)
    found = [rig.lookup(chain, with_disk=True)[0] for _ in range(48)]
    assert found.count(4) == 3
    assert found[0] == 0
    assert not rig.tiers.swap_out("a", chain, range(4), 4 * BLOCK_SIZE)
    assert rig.tiers.load().num_pinned == 0
    rig.tiers.note_prefill_rate(4 * BLOCK_SIZE / 2.0)
    assert rig.lookup(chain, with_disk=True) == (4, 0)


def test_a_slow_disk_is_passed_over_alone(rig: Rig) -> None:
    rig.store(range(4))
    rig.host.forget([name(2), name(3)])
    rig.tiers.note_prefill_rate(4 * BLOCK_SIZE / 0.5)
    chain = [name(n) for n in range(4)]
    assert rig.lookup(chain, with_disk=True) == (4, 2)
    rig.disk.rate.add(2 * rig.bytes, seconds=1.0)
    assert rig.lookup(chain, with_disk=True) == (2, 0)


def test_what_is_hot_on_the_device_does_not_grow_cold_behind_it(rig: Rig) -> None:
    rig.store(range(4))
    for start in range(100, 160, 10):
        rig.tiers.touch([name(n) for n in range(4)])
        for n in range(start, start + 10):
            slot = rig.host.reserve(name(n), rig.bytes)
            assert slot is not None
            rig.host.commit(slot, 0)
            rig.host.unpin([slot])
    assert rig.host.num_evicted > 10
    assert all(name(n) in rig.host for n in range(4))


def test_a_full_queue_to_the_disk_drops_and_counts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, max_writes=0)
    rig.store(range(3))
    assert rig.disk.num_dropped == 3
    assert len(rig.disk.disk) == 0
    assert all(name(n) in rig.host for n in range(3))
    rig.close()


class Store:
    """A fake of a store's thread that records lookups; it refuses them if not `is_usable`."""

    kind = identity = "store"
    num_corrupt = 0
    rate = SimpleNamespace(bytes_per_s=0.0)

    def __init__(self) -> None:
        self.is_usable = True
        self.asked: list[Sequence[bytes]] = []

    def look_up(self, names: Sequence[bytes]) -> object:
        self.asked.append(names)
        return self


def test_a_store_is_asked_only_while_it_answers(rig: Rig) -> None:
    store = Store()
    tiers = TieredCache(rig.host, rig.disk, rig.copier, rig.bytes, store=store)
    assert (tiers.look_up([name(1)]), tiers.load().store) == (store, "store")
    store.is_usable = False
    assert (tiers.look_up([name(2)]), tiers.load().store) == (None, "")
    assert store.asked == [[name(1)]]
    assert rig.tiers.look_up([name(1)]) is None
    tiers.close()


def test_a_store_that_fails_between_the_search_and_the_read_is_no_failed_step(rig: Rig) -> None:
    class Failing(Store):
        def __contains__(self, name: bytes) -> bool:
            return True

        def read(self, names: Sequence[bytes], block_bytes: int) -> TierRead:
            return TierRead(rig.host, names, block_bytes)

    store = Failing()
    tiers = TieredCache(rig.host, None, rig.copier, rig.bytes, store=store)
    assert tiers.place_of(name(1)) == "store"
    store.is_usable = False
    read = tiers.read([name(1)])
    tiers.cancel(read)
    tiers.close()


class Noted:
    """A fake part of the tiers that records its calls."""

    def __init__(self, told: list[tuple[str, object]], name: str) -> None:
        self._told, self._name = told, name

    def __getattr__(self, method: str) -> object:
        def note(*args: object) -> object:
            self._told.append((f"{self._name}.{method}", args[0] if args else None))
            return self

        return note


def test_every_tier_that_may_have_blocks_learns_what_happens_to_them(rig: Rig) -> None:
    told: list[tuple[str, object]] = []
    host, disk, store = (Noted(told, kind) for kind in ("host", "disk", "store"))
    tiers = TieredCache(host, disk, rig.copier, rig.bytes, store=store)
    told.clear()
    names = [name(1), name(2)]
    tiers.touch(names)
    tiers.end_chain(names)
    tiers.forget(names)
    assert told == [
        *(("host.touch", names), ("disk.note_reuse", names), ("store.note_reuse", names), ("host.refresh", names)),
        *(("disk.forget", names), ("store.forget", names), ("host.forget", names)),
    ]
    tiers.close()


def test_hosts_that_fetch_from_here_hear_of_hand_overs_and_what_is_asked_of_them_ends_with_a_reset(rig: Rig) -> None:
    told: list[tuple[str, object]] = []
    read = TierRead(rig.host, [name(1)], rig.bytes)
    reader = SimpleNamespace(num_heard=3, num_corrupt=0, read=lambda *asked: told.append(("read", asked)) or read)
    server = Noted(told, "server")
    server.rate = SimpleNamespace(bytes_per_s=20.0 * rig.bytes)  # type: ignore[attr-defined]
    closing = Noted(told, "peers")
    peers = SimpleNamespace(identity="tiny", reader=reader, server=server, close=closing.close)
    tiers = TieredCache(rig.host, None, rig.copier, rig.bytes, peers=peers)
    assert (tiers.num_heard, tiers.load().handed_over_blocks_per_s, rig.tiers.num_heard) == (3, 20.0, 0)
    tiers.begin_hand_over("h")
    tiers.end_hand_over("h")
    source = BlockSource("tcp://h:1", "h", 1.0)
    assert (tiers.ask(source, [name(1)]), rig.tiers.ask(source, [name(1)])) == (read, None)
    tiers.reset()
    assert read.is_cancelled
    tiers.close()
    assert told == [
        ("server.begin", "h"),
        ("server.end", "h"),
        ("read", (source, "tiny", [name(1)], rig.bytes)),
        ("peers.close", None),
    ]


def test_a_lookup_that_is_cancelled_asks_the_store_nothing(rig: Rig) -> None:
    lookup = StoreLookup([name(1)], 0.0)
    rig.tiers.cancel(lookup)
    assert lookup.is_cancelled


def test_a_cuda_device_copies_from_registered_slots_by_itself_and_a_damaged_block_ends_the_fetch_there_too(
    tmp_path: Path,
) -> None:
    registrar, size = FakeRegistrar(), 4096
    slots = SlotMemory(torch.device("cuda"), 4 * size, registrar)
    cache = torch.randint(0, 256, (32, size), dtype=torch.uint8)
    for life in range(2):  # the second life finds the files of the first
        host = HostTier.open(tmp_path / "host", 8 * size, memory=slots)
        memory, stream = host.add_size(size), FakeCopyStream()
        tiers = TieredCache(host, None, CudaBlockCopier(cache, memory, stream), size)
        if life == 0:
            for n in range(8):
                tiers.store(n, name(n))
            tiers.begin_stores(everything=True)
            assert tiers.wait_until_idle(10)
        else:
            slot = host.pin(name(5), is_hit=False)
            assert slot is not None
            slot.memory[7] ^= 1
            host.unpin([slot])
        until(lambda memory=memory: memory.covers(0, 8 * size))
        stream.copied.clear()
        fetch = tiers.fetch([name(n) for n in range(8)], range(16, 24))
        assert tiers.wait_until_idle(10)
        num_sound = 5 if life else 8
        assert fetch.num_blocks == num_sound
        assert torch.equal(cache[16 : 16 + num_sound], cache[:num_sound])
        assert [(source - memory.address, num_bytes) for _, source, num_bytes in stream.copied] == [
            (0, 4 * size), (4 * size, (num_sound - 4) * size)
        ]  # fmt: skip
        cache[16:] = 0
        tiers.close()
        host.close()
        assert registrar.registered == {}

"""The thread between the host tier and the store of a cluster, with a fake store: lookups, reads, writes and failures."""

from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from pilotlight.engine.kv.store.store_thread import StoreThread
from pilotlight.engine.kv.store.store_tier import BATCH_BYTES, StoreError, StoreTier, own_address
from pilotlight.engine.kv.tier_protocol import LOOKUP_TIMEOUT_S
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead
from tests.clock import Clock
from tests.engine.kv.fake_store import FakeStore
from tests.engine.kv.tiers.test_host_tier import SIZE, STRIDE, content, name, put, read
from tests.waiting import until

pytestmark = pytest.mark.process


class Cluster:
    """Two hosts with one store: one writes blocks, the other reads them."""

    def __init__(self, directory: Path, max_found: int = 1 << 16, batch_bytes: int = BATCH_BYTES) -> None:
        self.package = FakeStore()
        self.clock = Clock()
        self.there = HostTier.open(directory / "there", 40 * STRIDE)
        self.here = HostTier.open(directory / "here", 40 * STRIDE)
        self.disk = DiskTier.open(directory / "disk", 1 << 20)
        self.writer = StoreThread("a store", self.there, clock=self.clock, batch_bytes=batch_bytes, join=self.join)
        self.reader = StoreThread("a store", self.here, self.disk, self.clock, max_found, join=self.join)
        until(lambda: self.writer.is_usable and self.reader.is_usable)

    def join(self, master: str) -> StoreTier:
        return StoreTier(self.package)

    def write(self, *numbers: int) -> None:
        self.write_later(*numbers)
        assert self.writer.wait_until_idle(10)

    def write_later(self, *numbers: int) -> None:
        for n in numbers:
            assert put(self.there, n)
            self.writer.offer(name(n))

    def look_up(self, *numbers: int) -> list[int]:
        lookup = self.reader.look_up([name(n) for n in numbers])
        until(lambda: lookup.is_done)
        return [n for n in numbers if name(n) in self.reader]

    def read(self, *numbers: int) -> TierRead:
        return self.reader.read([name(n) for n in numbers], SIZE)

    def take(self, read: TierRead) -> int:
        until(lambda: read.is_done)
        slots = read.take()
        self.here.unpin(slots)
        return len(slots)

    def close(self) -> None:
        self.package.may_answer.set()
        for thread in (self.reader, self.writer):
            thread.close()
        for tier in (self.here, self.there, self.disk):
            tier.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def test_a_host_reads_what_another_has_computed(cluster: Cluster) -> None:
    cluster.write(*range(6))
    assert cluster.look_up(*range(8)) == [0, 1, 2, 3, 4, 5]
    assert cluster.take(cluster.read(*range(8))) == 6
    assert [n for n in range(8) if name(n) in cluster.reader] == [*range(6)], "blocks that were read stay in the index"
    assert [read(cluster.here, n) for n in range(6)] == [content(n) for n in range(6)]
    assert cluster.reader.rate.bytes_per_s == 0  # the clock stands still, so there is no rate


def test_a_chain_of_which_disk_and_memory_have_a_part_is_read_from_all_three(cluster: Cluster) -> None:
    cluster.write(2, 3)
    assert put(cluster.here, 0)
    slot = cluster.here.pin(name(0), is_hit=False)
    assert slot is not None
    assert cluster.disk.write(name(1), memoryview(content(1)), crc32(content(1)))
    cluster.here.unpin([slot])
    chain = cluster.read(0, 1, 2, 3)
    assert cluster.take(chain) == 4
    assert chain.num_read == 3
    assert [read(cluster.here, n) for n in range(4)] == [content(n) for n in range(4)]


@pytest.mark.parametrize("wrong", ["cut", "longer", "flipped", "another block", "of no sense", "gone"])
def test_a_block_that_is_not_what_its_name_says_is_removed_and_its_chain_ends_there(
    cluster: Cluster, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.write(0, 1, 2)
    keys = list(cluster.package.values)
    first, value = cluster.package.values[keys[0]], cluster.package.values[keys[1]]
    flipped = value[:-1] + bytes([value[-1] ^ 1])
    bad = {"cut": value[:-1], "longer": value + b"x", "flipped": flipped, "another block": first, "of no sense": b"?"}
    if wrong == "gone":
        del cluster.package.values[keys[1]]
    else:
        cluster.package.values[keys[1]] = bad[wrong]
    assert 1 in cluster.look_up(0, 1, 2) or wrong == "gone"
    assert cluster.take(cluster.read(0, 1, 2)) == 1
    assert keys[1] not in cluster.package.values
    assert name(1) not in cluster.reader
    assert read(cluster.here, 1) is None
    assert ("does not match its name" in caplog.text) == (wrong != "gone")
    cluster.writer.offer(name(1))  # another host has computed the block again
    assert cluster.writer.wait_until_idle(10)
    assert cluster.take(cluster.read(0, 1, 2)) == 3


def test_of_what_the_store_has_a_bounded_number_of_names_is_known_the_newest(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, max_found=3)
    cluster.write(*range(5))
    assert cluster.look_up(0, 1, 2) == [0, 1, 2]
    cluster.look_up(3, 4)
    assert [n for n in range(5) if name(n) in cluster.reader] == [2, 3, 4]
    cluster.close()


def test_a_lookup_without_waiting_callers_asks_nothing(cluster: Cluster) -> None:
    cluster.write(0)
    cluster.package.may_answer.clear()
    first = cluster.reader.look_up([name(9)])
    second = cluster.reader.look_up([name(0)])
    second.is_cancelled = True
    cluster.package.may_answer.set()
    until(lambda: first.is_done and second.is_done)
    assert name(0) not in cluster.reader


def test_a_store_that_hangs_is_asked_nothing_more_until_it_answers(cluster: Cluster) -> None:
    cluster.package.may_answer.clear()
    lookup = cluster.reader.look_up([name(0)])
    assert cluster.reader.is_usable
    cluster.clock.now += LOOKUP_TIMEOUT_S + 0.1
    assert not cluster.reader.is_usable
    lookup.is_cancelled = True
    cluster.package.may_answer.set()
    until(lambda: cluster.reader.is_usable)
    assert lookup.is_done


def test_a_read_that_is_cancelled_while_the_store_hangs_leaves_nothing_pinned(cluster: Cluster) -> None:
    cluster.write(0, 1)
    cluster.package.asked.clear()
    cluster.package.may_answer.clear()
    chain = cluster.read(0, 1)
    assert cluster.package.asked.wait(60)
    chain.cancel()
    cluster.package.may_answer.set()
    assert cluster.reader.wait_until_idle(10)
    assert not [n for n in range(2) if (slot := cluster.here.pin(name(n), is_hit=False)) and slot.pins > 1]


def test_a_master_that_is_gone_is_left_alone_for_a_while_and_asked_again(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.package.is_gone = True
    for _ in range(3):
        assert cluster.look_up(0) == []
    assert not cluster.reader.is_usable
    assert put(cluster.there, 0)
    cluster.writer.offer(name(0))  # this write is lost
    assert cluster.writer.wait_until_idle(10)
    assert caplog.text.count("no longer read") == 1
    cluster.package.is_gone = False  # the store comes back, empty
    cluster.clock.now += 10.1
    cluster.write(1)
    assert cluster.look_up(0, 1) == [1]
    assert cluster.reader.is_usable
    assert "is read again" in caplog.text


def test_a_store_that_fails_is_known_to_work_again_by_its_answers_alone(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed store counts as working again when it answers, not when a cancelled request, which is never sent, ends."""
    cluster.package.is_gone = True
    cluster.package.may_answer.clear()
    lookups = [cluster.reader.look_up([name(n)]) for n in range(4)]
    read = cluster.read(0)
    lookups[3].is_cancelled = True
    read.cancel()
    cluster.package.may_answer.set()
    assert cluster.reader.wait_until_idle(10)
    assert read.is_done
    assert not cluster.reader.is_usable
    assert "is read again" not in caplog.text


def test_writes_that_are_dropped_while_a_store_fails_are_no_sign_that_it_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(tmp_path, batch_bytes=2)
    cluster.package.is_gone = True
    cluster.package.may_answer.clear()
    cluster.write_later(*range(6))
    cluster.package.may_answer.set()
    assert cluster.writer.wait_until_idle(10)
    cluster.writer.forget([name(99)])  # runs after the writes
    assert cluster.writer.wait_until_idle(10)
    cluster.package.is_gone = False
    cluster.write(7)
    assert not cluster.package.values, "a failed store is not written to"
    assert "is written to again" not in caplog.text
    cluster.clock.now += 10.1
    cluster.write(8)
    assert cluster.look_up(*range(9)) == [8]
    assert "is written to again" in caplog.text
    cluster.close()


def test_memory_that_the_package_did_not_take_is_offered_to_it_again(cluster: Cluster) -> None:
    """The package can copy only to registered memory, so registration is tried again."""
    cluster.write(0)
    cluster.look_up(0)
    cluster.package.may_register = False
    assert cluster.take(cluster.read(0)) == 0
    assert cluster.take(cluster.read(0)) == 0
    assert cluster.reader.num_errors == 2
    cluster.package.may_register = True
    assert cluster.take(cluster.read(0)) == 1


def test_a_full_store_takes_no_more_and_gives_what_it_has(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.write(0, 1)
    cluster.package.limit = 2
    for n in range(2, 6):
        cluster.write(n)
    assert caplog.text.count("no longer written to") == 1
    assert cluster.look_up(*range(6)) == [0, 1]
    assert cluster.take(cluster.read(0, 1)) == 2


def test_content_that_is_known_to_be_bad_is_removed_for_all(cluster: Cluster) -> None:
    cluster.write(0, 1)
    cluster.look_up(0, 1)
    cluster.reader.forget([name(0)])
    assert cluster.reader.wait_until_idle(10)
    assert cluster.look_up(0, 1) == [1]
    assert not any(name(0).hex() in key for key in cluster.package.values)


def test_members_know_their_store_by_one_name_and_an_empty_one_by_another(cluster: Cluster) -> None:
    def names_of_it() -> set[str]:
        for thread in (cluster.reader, cluster.writer):
            lookup = thread.look_up([name(0)])
            until(lambda lookup=lookup: lookup.is_done)
            assert thread.wait_until_idle(10)
        return {cluster.reader.identity, cluster.writer.identity}

    (first,) = names_of_it()
    assert len(first) == 16
    cluster.package.values.clear()
    cluster.clock.now += 61
    (second,) = names_of_it()
    assert second != first


def test_a_host_starts_without_its_store_and_uses_it_when_it_comes(tmp_path: Path) -> None:
    tries = iter([True, False])

    def join(master: str) -> StoreTier:
        if next(tries):
            raise StoreError("there is no master")
        return StoreTier(FakeStore())

    host = HostTier.open(tmp_path, 4 * STRIDE)
    thread = StoreThread("127.0.0.1:1", host, retry_s=0.01, join=join)
    until(lambda: thread.is_usable)
    assert thread.num_errors == 1
    thread.close()
    host.close()


def test_an_invalid_address_is_refused_by_name() -> None:
    with pytest.raises(StoreError, match="nonsense is not an address of Mooncake's master"):
        own_address("nonsense")

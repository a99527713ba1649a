"""The host tier: its content, its evictions, its state after SIGKILL, its owners, and access by a device."""

import ctypes
import errno
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.engine.kv.tier_protocol import TierError
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.slot_file import PAGE, SlotFile, SlotFileReader, lock_directory
from tests.engine.fake_registrar import REFUSAL, FakeRegistrar
from tests.engine.kv.tiers.faulty_files import FaultyFiles
from tests.waiting import until

ROOT = Path(__file__).parents[4]
SIZE = 3 * PAGE - 100  # a block whose slot takes three pages
STRIDE = 3 * PAGE


def name(n: int) -> bytes:
    return blake2b(str(n).encode(), digest_size=32).digest()


def content(n: int, size: int = SIZE) -> bytes:
    return (name(n) * (size // 32 + 1))[:size]


def put(tier: HostTier, n: int, size: int = SIZE) -> bool:
    slot = tier.reserve(name(n), size)
    if slot is None:
        return False
    slot.memory[:] = content(n, size)
    tier.commit(slot, crc32(slot.memory))
    tier.unpin([slot])
    return True


def read(tier: HostTier, n: int) -> bytes | None:
    slot = tier.pin(name(n), is_hit=True)
    if slot is None:
        return None
    sound = tier.is_sound(slot)
    found = bytes(slot.memory)
    tier.unpin([slot])
    return found if sound else None


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[HostTier]:
    opened = HostTier.open(tmp_path / "tier", 10 * STRIDE)
    yield opened
    opened.close()


def test_what_is_put_is_found(tier: HostTier) -> None:
    assert all(put(tier, n) for n in range(5))
    assert [read(tier, n) == content(n) for n in range(6)] == [True] * 5 + [False]
    assert len(tier.pin_prefix([name(3), name(1), name(77), name(2)])) == 2


def test_a_block_is_found_only_once_it_is_committed(tier: HostTier) -> None:
    slot = tier.reserve(name(1), SIZE)
    assert slot is not None
    assert name(1) not in tier
    assert tier.pin(name(1), is_hit=True) is None
    assert tier.reserve(name(1), SIZE) is None, "another thread is filling it already"
    tier.abandon(slot)
    assert put(tier, 1)


def test_the_oldest_gives_way_and_the_limit_holds(tier: HostTier) -> None:
    for n in range(25):
        assert put(tier, n)
        assert tier.space.used_bytes <= tier.space.limit_bytes
    assert [n for n in range(25) if name(n) in tier] == list(range(15, 25))


def test_a_scan_does_not_push_out_what_is_hit(tier: HostTier) -> None:
    for n in range(4):
        put(tier, n)
    for n in range(4):
        assert read(tier, n) is not None
    for n in range(100, 200):
        put(tier, n)
    assert all(read(tier, n) == content(n) for n in range(4))


def test_a_chains_tail_goes_before_its_head(tier: HostTier) -> None:
    chain = [name(n) for n in range(10)]
    for n in range(10):
        put(tier, n)
    tier.refresh(chain)
    put(tier, 99)
    assert [h in tier for h in chain] == [True] * 9 + [False]
    tier.unpin(tier.pin_prefix(chain))
    put(tier, 98)
    assert [h in tier for h in chain][:7] == [True] * 7


def test_pinned_blocks_never_give_way(tier: HostTier) -> None:
    for n in range(10):
        put(tier, n)
    pinned = tier.pin_prefix([name(n) for n in range(10)])
    assert not put(tier, 50), "everything is pinned"
    tier.unpin(pinned[4:5])
    assert put(tier, 50)
    assert [name(n) in tier for n in range(10)] == [n != 4 for n in range(10)]
    tier.unpin(pinned[:4] + pinned[5:])
    with pytest.raises(AssertionError, match="more often"):
        tier.unpin(pinned[:1])


def test_blocks_of_several_sizes_share_one_limit(tier: HostTier) -> None:
    for n in range(10):
        put(tier, n)
    assert put(tier, 100, size=5 * PAGE)
    assert tier.space.used_bytes <= tier.space.limit_bytes
    assert read(tier, 100) == content(100, 5 * PAGE)
    assert [name(n) in tier for n in range(10)] == [False] * 2 + [True] * 8
    with pytest.raises(TierError, match="raise kv_host_gib"):
        tier.add_size(11 * STRIDE)


def test_what_gives_way_to_another_size_gives_its_memory_back(tmp_path: Path) -> None:
    directory = tmp_path / "tier"
    tier = HostTier.open(directory, 64 * PAGE)
    for n in range(64):
        put(tier, n, size=PAGE)
    file = directory / f"slots-{PAGE}.kv"
    before = file.stat().st_blocks * 512
    if before < 64 * PAGE:
        pytest.skip("this file system does not say what a file costs")
    assert put(tier, 100, size=32 * PAGE)
    assert file.stat().st_blocks * 512 <= before - 32 * PAGE
    tier.close()


class FileSystem:
    """A file system with so many bytes for the bodies of slots."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.memory = SlotMemory(torch.device("cpu"), allocate=self._allocate)

    def _allocate(self, fd: int, offset: int, num_bytes: int) -> None:
        if offset > 0:
            if num_bytes > self.num_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.num_bytes -= num_bytes
        os.posix_fallocate(fd, offset, num_bytes)


def test_a_full_file_system_lowers_the_limit_instead_of_killing_the_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = HostTier.open(tmp_path, 10 * STRIDE, memory=FileSystem(4 * STRIDE).memory)
    assert [put(tier, n) for n in range(8)] == [True] * 4 + [False] + [True] * 3
    assert tier.space.limit_bytes == 4 * STRIDE
    assert [n for n in range(8) if name(n) in tier] == [3, 5, 6, 7]
    assert caplog.text.count("is limited to") == 1
    tier.close()


def test_a_file_system_that_was_full_for_long_takes_blocks_when_it_no_longer_is(tmp_path: Path) -> None:
    system = FileSystem(0)
    tier = HostTier.open(tmp_path, 10 * STRIDE, memory=system.memory)
    assert not any(put(tier, n) for n in range(20))  # twice as many as there are slots
    system.num_bytes = STRIDE
    assert put(tier, 20)
    assert read(tier, 20) == content(20)
    tier.close()


def test_what_is_hit_again_and_again_does_not_shut_others_out_of_a_tier_that_has_shrunk(tmp_path: Path) -> None:
    """A container's /dev/shm often has only 64 MiB, whatever size the tier was given. Protected blocks may take only a share of the real size."""
    tier = HostTier.open(tmp_path / "tier", 1000 * STRIDE, memory=FileSystem(10 * STRIDE).memory)
    assert all(put(tier, n) and read(tier, n) for n in range(10))
    assert not put(tier, 10), "the failure shrinks the tier"
    assert put(tier, 11)
    assert put(tier, 12)
    assert [read(tier, n) == content(n) for n in (11, 12)] == [True, True]
    tier.close()


def test_an_owner_that_is_about_to_let_go_is_waited_for(tmp_path: Path) -> None:
    for open_tier in (HostTier.open, DiskTier.open):
        before = open_tier(tmp_path, 10 * STRIDE)
        leaving = threading.Timer(0.05, before.close)
        leaving.start()
        after = open_tier(tmp_path, 10 * STRIDE, patience_s=20.0)
        leaving.join()
        with pytest.raises(TierError, match="another engine host is using it"):
            open_tier(tmp_path, 10 * STRIDE, patience_s=0.01)
        after.close()


def test_a_tier_that_is_closed_while_a_slot_is_being_filled_is_no_other_processs_before_this_one_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A read from a hanging disk may still write to the slot after the next owner has given it to another block."""
    tier = HostTier.open(tmp_path, 10 * STRIDE)
    slots = [tier.reserve(name(n), SIZE) for n in range(3)]
    commit, abandon, forget = slots
    assert commit is not None
    assert abandon is not None
    assert forget is not None
    tier.commit(commit, 0)
    tier.abandon(abandon)
    tier.forget([name(2)])
    tier.close()
    assert "still being filled" in caplog.text
    with pytest.raises(TierError, match="another engine host is using it"):
        HostTier.open(tmp_path, 10 * STRIDE)


def test_a_tier_whose_slots_are_all_filled_or_given_up_is_free_for_others_when_it_is_closed(tmp_path: Path) -> None:
    tier = HostTier.open(tmp_path, 10 * STRIDE)
    for end in (lambda slot: tier.commit(slot, 0), tier.abandon):
        slot = tier.reserve(name(1), SIZE)
        assert slot is not None
        tier.forget([name(1)])
        end(slot)
    assert put(tier, 3)
    tier.close()
    HostTier.open(tmp_path, 10 * STRIDE).close()


def test_no_other_user_may_read_it(tier: HostTier, tmp_path: Path) -> None:
    put(tier, 1)
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "tier", *(tmp_path / "tier").iterdir()]
    }
    assert modes == {"tier": 0o700, "owner.lock": 0o600, f"slots-{SIZE}.kv": 0o600}


def test_a_directory_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    for mode in (0o755, 0o701, 0o770):
        (tmp_path / "tier").mkdir(exist_ok=True)
        (tmp_path / "tier").chmod(mode)
        HostTier.open(tmp_path / "tier", 10 * STRIDE).close()
        assert stat.S_IMODE((tmp_path / "tier").stat().st_mode) == 0o700


def test_a_link_in_the_directorys_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tier").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TierError, match="not a directory owned by this user"):
        HostTier.open(tmp_path / "tier", 10 * STRIDE)


def test_the_next_process_finds_what_the_last_left_in_order_of_use(tmp_path: Path) -> None:
    ticks = iter(range(1000))
    first = HostTier.open(tmp_path, 10 * STRIDE, clock=lambda: next(ticks))
    for n in range(10):
        put(first, n)
    read(first, 0)
    first.close()
    second = HostTier.open(tmp_path, 10 * STRIDE)
    assert second.space.used_bytes == 10 * STRIDE
    assert all(name(n) in second for n in range(10))
    put(second, 10)
    assert [n for n in range(11) if name(n) not in second] == [1], "block 0 was used more recently than block 1"
    assert read(second, 0) == content(0)
    second.close()


def test_a_damaged_body_is_noticed_when_it_is_read_and_a_damaged_header_when_it_is_opened(tmp_path: Path) -> None:
    first = HostTier.open(tmp_path, 10 * STRIDE)
    for n in range(3):
        put(first, n)
    first.close()
    file = tmp_path / f"slots-{SIZE}.kv"
    damaged = bytearray(file.read_bytes())
    damaged[PAGE + 64 * 1 + 20] ^= 1  # in the second slot's hash
    bodies = len(damaged) - 10 * STRIDE
    damaged[bodies + 2 * STRIDE + 5000] ^= 1  # in the third slot's body
    file.write_bytes(damaged)
    second = HostTier.open(tmp_path, 10 * STRIDE)
    assert [name(n) in second for n in range(3)] == [True, False, True]
    assert second.num_corrupt == 1
    assert [read(second, n) == content(n) for n in range(3)] == [True, False, False]
    assert second.num_corrupt == 2
    assert name(2) not in second
    assert put(second, 2)
    second.close()


def test_a_damaged_block_is_bad_however_often_those_who_hold_it_look(tmp_path: Path) -> None:
    first = HostTier.open(tmp_path, 10 * STRIDE)
    put(first, 1)
    first.close()
    file = tmp_path / f"slots-{SIZE}.kv"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) - 10 * STRIDE + 5000] ^= 1
    file.write_bytes(damaged)
    second = HostTier.open(tmp_path, 10 * STRIDE)
    pinned = second.pin_prefix([name(1)]) + second.pin_prefix([name(1)])
    assert [second.is_sound(slot) for slot in (*pinned, *pinned)] == [False] * 4
    assert second.num_corrupt == 1
    second.unpin(pinned)
    assert second.space.used_bytes == 0
    second.close()


@pytest.mark.parametrize("change", ["truncated", "another limit", "nonsense"])
def test_a_file_of_another_geometry_is_made_anew(tmp_path: Path, change: str) -> None:
    first = HostTier.open(tmp_path, 10 * STRIDE)
    put(first, 1)
    first.close()
    file = tmp_path / f"slots-{SIZE}.kv"
    if change == "truncated":
        os.truncate(file, 5 * PAGE)
    elif change == "nonsense":
        file.write_bytes(b"nonsense")
    second = HostTier.open(tmp_path, (9 if change == "another limit" else 10) * STRIDE)
    assert len(second) == 0
    assert put(second, 1)
    assert read(second, 1) == content(1)
    second.close()


def test_files_that_hold_no_blocks_of_ours_are_removed(tmp_path: Path) -> None:
    first = HostTier.open(tmp_path, 10 * STRIDE)
    put(first, 1)
    first.close()
    for odd in ("slots-.kv", "slots-x.kv", "slots-0.kv", f"slots-{11 * STRIDE}.kv"):
        (tmp_path / odd).write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("not ours")
    second = HostTier.open(tmp_path, 10 * STRIDE)
    assert read(second, 1) == content(1)
    assert {path.name for path in tmp_path.iterdir()} == {f"slots-{SIZE}.kv", "owner.lock", "notes.txt"}
    second.close()


def test_of_a_block_that_was_left_in_two_sizes_the_one_used_first_stays_and_the_others_slot_is_free(
    tmp_path: Path,
) -> None:
    for n, size in ((1, SIZE), (2, PAGE)):  # written in separate folders, which are merged below
        tier = HostTier.open(tmp_path / str(n), 10 * STRIDE, clock=partial(float, n))
        put(tier, 7, size=size)
        tier.close()
    shutil.copy(tmp_path / "2" / f"slots-{PAGE}.kv", tmp_path / "1")
    both = HostTier.open(tmp_path / "1", 10 * STRIDE)
    assert (len(both), both.space.used_bytes, read(both, 7)) == (1, STRIDE, content(7))
    assert all(put(both, 100 + n, size=PAGE) for n in range(30)), "every slot of the other size is available"
    both.close()


def test_what_is_forgotten_twice_is_freed_once(tier: HostTier) -> None:
    slot = tier.reserve(name(1), SIZE)
    assert slot is not None
    tier.forget([name(1)])
    tier.forget([name(1)])
    tier.abandon(slot)
    assert tier.space.used_bytes == 0
    assert [put(tier, n) for n in range(10)] == [True] * 10
    assert [n for n in range(10) if name(n) in tier] == list(range(10))


def test_a_file_that_cannot_be_made_is_said_to_be_the_tiers(tmp_path: Path) -> None:
    failures = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))]

    def fail_once(fd: int, offset: int, num_bytes: int) -> None:
        if failures:
            raise failures.pop()

    tier = HostTier.open(tmp_path, 10 * STRIDE, memory=SlotMemory(torch.device("cpu"), allocate=fail_once))
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TierError, match="cannot grow: No space left on device"):
        tier.add_size(PAGE)
    assert len(os.listdir("/proc/self/fd")) == num_open
    tier.add_size(PAGE)
    assert put(tier, 1, size=PAGE)
    tier.close()


def test_a_tier_that_cannot_be_looked_through_is_not_kept_from_others(tmp_path: Path) -> None:
    first = HostTier.open(tmp_path, 10 * STRIDE)
    put(first, 1)
    first.close()
    (tmp_path / f"slots-{PAGE}.kv").mkdir()
    with pytest.raises(TierError, match="cannot be used: Is a directory"):
        HostTier.open(tmp_path, 10 * STRIDE)
    (tmp_path / f"slots-{PAGE}.kv").rmdir()
    second = HostTier.open(tmp_path, 10 * STRIDE)
    assert read(second, 1) == content(1)
    second.close()


def found_after_a_kill(tier: HostTier, tmp_path: Path) -> list[int]:
    """Return the blocks that a successor would find if this process were killed now."""
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "tier", left)
    heir = HostTier.open(left, tier.space.limit_bytes)
    found = [n for n in range(100) if name(n) in heir]
    heir.close()
    return found


def test_a_slot_that_is_being_filled_again_is_not_found_under_its_old_name(tier: HostTier, tmp_path: Path) -> None:
    for n in range(10):
        put(tier, n)
    slot = tier.reserve(name(10), SIZE)
    assert slot is not None
    slot.memory[: SIZE // 2] = content(10)[: SIZE // 2]
    assert found_after_a_kill(tier, tmp_path) == list(range(1, 10))


def test_a_forgotten_block_is_not_found_after_a_kill_though_it_is_still_held(tier: HostTier, tmp_path: Path) -> None:
    put(tier, 1)
    put(tier, 2)
    pinned = tier.pin_prefix([name(1)])
    tier.forget([name(1)])
    assert found_after_a_kill(tier, tmp_path) == [2]
    tier.unpin(pinned)


def test_a_block_that_was_forgotten_while_it_was_written_is_never_found(tier: HostTier, tmp_path: Path) -> None:
    slot = tier.reserve(name(1), SIZE)
    assert slot is not None
    tier.forget([name(1)])
    tier.commit(slot, crc32(slot.memory))
    assert name(1) not in tier
    assert found_after_a_kill(tier, tmp_path) == []
    tier.unpin([slot])
    assert tier.space.used_bytes == 0


WRITER = """
import sys
from pathlib import Path
from zlib import crc32
from pilotlight.engine.kv.tiers.host_tier import HostTier
from tests.engine.kv.tiers.test_host_tier import SIZE, STRIDE, content, name, put
tier = HostTier.open(Path(sys.argv[1]), 10 * STRIDE)
start = int(sys.argv[2])
"""
ENDLESS = WRITER + (
    "for n in range(start, start + 10): put(tier, n)\n"
    "print('ready', flush=True)\n"
    "for n in range(start + 10, 10**9): put(tier, n)\n"
)


def numbers_in(tier: HostTier | DiskTier, starts: Sequence[int]) -> list[int]:
    """Return the numbers of all blocks of a tier, which writers have counted from one of `starts`."""
    found: list[int] = []
    for start in reversed(starts):
        for n in range(start, start + 10**6):
            if len(found) == len(tier):
                return found
            if name(n) in tier:
                found.append(n)
    raise AssertionError("a block has a name that no writer gave")


def kill_in(script: str, directory: Path, start: int, after_s: float) -> None:
    command = [sys.executable, "-c", script, str(directory), str(start)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        signal.sigtimedwait([], after_s)
        child.kill()


@pytest.mark.process
def test_a_process_killed_at_any_time_leaves_a_tier_that_is_right(tmp_path: Path) -> None:
    draw = random.Random(7)
    for i in range(4):
        kill_in(ENDLESS, tmp_path, i * 10**7, after_s=0.05 * draw.random())
        tier = HostTier.open(tmp_path, 10 * STRIDE)
        assert len(tier) >= 9, "at most the block that was being written is lost"
        for n in numbers_in(tier, range(0, (i + 1) * 10**7, 10**7)):
            assert read(tier, n) == content(n)
        tier.close()


@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "big", "read", "pin", "unpin", "forget", "reopen"]), st.integers(0, 15)),
        max_size=60,
    )
)
@settings(deadline=None, max_examples=60)
def test_whatever_happens_a_found_block_is_the_right_one_and_the_limit_holds(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    directory = tmp_path_factory.mktemp("tier")
    tier = HostTier.open(directory, 6 * STRIDE)
    pinned = []
    for action, n in actions:
        if action == "put":
            put(tier, n)
        elif action == "big":
            put(tier, n + 100, size=4 * PAGE)
        elif action == "read":
            assert read(tier, n) in (None, content(n))
        elif action == "pin":
            pinned += [(n, slot) for slot in tier.pin_prefix([name(n)])]
        elif action == "unpin" and pinned:
            tier.unpin([pinned.pop(n % len(pinned))[1]])
        elif action == "forget":
            tier.forget([name(n)])
        elif action == "reopen" and not pinned:
            before = {n for n in range(120) if name(n) in tier}
            tier.close()
            tier = HostTier.open(directory, 6 * STRIDE)
            assert {n for n in range(120) if name(n) in tier} == before
        assert tier.space.used_bytes <= tier.space.limit_bytes
        for held, slot in pinned:
            assert bytes(slot.memory) == content(held)
    tier.unpin([slot for _, slot in pinned])
    found = [slot for n in range(120) if (slot := tier.pin(name(n), is_hit=False)) is not None]
    assert len(found) == len(tier)
    assert tier.space.used_bytes == sum(slot.file.stride for slot in found)
    tier.unpin(found)
    tier.close()


@pytest.mark.parametrize("left", ["nothing", "a part of its header", "another size", "another version"])
def test_a_file_of_other_slots_is_not_read_and_not_kept_open(tier: HostTier, tmp_path: Path, left: str) -> None:
    put(tier, 1)
    file = tmp_path / "tier" / f"slots-{SIZE}.kv"
    header = bytearray(file.read_bytes()[:PAGE])
    if left == "another version":
        header[8] ^= 1
    other = tmp_path / "tier" / f"slots-{PAGE}.kv"
    other.write_bytes({"nothing": b"", "a part of its header": header[:9]}.get(left, bytes(header)))
    num_open = len(os.listdir("/proc/self/fd"))
    if left == "another version":
        other.rename(file)
    with pytest.raises(OSError, match="it is not a file of slots of this size"):
        SlotFileReader(tmp_path / "tier", SIZE if left == "another version" else PAGE)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_reader_takes_only_what_a_slot_says_it_holds(tier: HostTier, tmp_path: Path) -> None:
    put(tier, 1)
    slot = tier.pin(name(1), is_hit=False)
    assert slot is not None
    reader, into = SlotFileReader(tmp_path / "tier", SIZE), memoryview(bytearray(SIZE))
    for index, block in ((slot.index, 2), (slot.index + 1, 1), (-1, 1), (10, 1), (10**9, 1)):
        assert not reader.read(index, name(block), into)
    assert bytes(into) == bytes(SIZE)
    assert reader.read(slot.index, name(1), into)
    tier.unpin([slot])
    reader.close()


def test_a_block_that_gives_way_while_another_process_reads_it_is_not_taken(tier: HostTier, tmp_path: Path) -> None:
    assert put(tier, 0)
    slot = tier.pin(name(0), is_hit=False)
    assert slot is not None
    tier.unpin([slot])
    files, into = FaultyFiles(), memoryview(bytearray(SIZE))
    reader = SlotFileReader(tmp_path / "tier", SIZE, files)
    assert reader.read(slot.index, name(0), into)
    assert into == content(0)

    def slowly(fd: int, buffers: list[memoryview], at: int) -> int:
        for n in range(1, 20):
            put(tier, n)
        return os.preadv(fd, buffers, at)

    files.preadv = slowly
    assert not reader.read(slot.index, name(0), into)
    reader.close()


GROUP = 3  # the number of slots that are registered together


@pytest.fixture
def registrar() -> FakeRegistrar:
    return FakeRegistrar()


def registered(registrar: FakeRegistrar) -> SlotMemory:
    """Return memory that is registered in groups of GROUP slots with a fake device."""
    return SlotMemory(torch.device("cuda"), GROUP * STRIDE + PAGE, registrar)


def reaches(tier: HostTier, n: int, size: int = SIZE) -> bool:
    """Tell whether a block's slot is registered with the device."""
    slot = tier.pin(name(n), is_hit=False)
    assert slot is not None
    tier.unpin([slot])
    at = ctypes.addressof(ctypes.c_char.from_buffer(slot.memory)) - tier.add_size(size).address
    return tier.add_size(size).covers(at, at + size)


def test_slots_are_registered_once_as_many_as_lie_together_have_pages(registrar: FakeRegistrar, tmp_path: Path) -> None:
    tier = HostTier.open(tmp_path / "tier", 10 * STRIDE, memory=registered(registrar))
    for n in range(GROUP - 1):
        put(tier, n)
    assert not tier.add_size(SIZE).wait(0.02)
    assert registrar.calls == [], "registration would allocate missing pages, so it waits"
    for n in range(GROUP - 1, 10):
        put(tier, n)
    assert tier.add_size(SIZE).wait(60)
    assert list(registrar.registered.values()) == [3 * STRIDE, 3 * STRIDE, 3 * STRIDE, STRIDE]
    assert all(reaches(tier, n) for n in range(10))
    for n in range(10, 20):
        put(tier, n)
    assert len(registrar.calls) == 4, "reused slots are registered already"
    assert reaches(tier, 19)
    tier.close()
    assert registrar.registered == {}


def test_memory_that_goes_to_another_size_is_covered_no_more_before_its_pages_go(
    registrar: FakeRegistrar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = HostTier.open(tmp_path / "tier", 9 * STRIDE, memory=registered(registrar))
    for n in range(9):
        put(tier, n)
    assert tier.add_size(SIZE).wait(60)
    covered, discard = [], SlotFile._discard_pages

    def noticed(self: SlotFile, first: int, last: int) -> None:
        covered.append(self.registered.covers(first * self.stride, (last + 1) * self.stride))
        discard(self, first, last)

    monkeypatch.setattr(SlotFile, "_discard_pages", noticed)
    with tier.add_size(SIZE).in_use():  # while another slot of the group is being copied
        assert put(tier, 100, PAGE)
        assert covered == [False]
        assert (reaches(tier, 1), reaches(tier, 3)) == (False, True)
        time.sleep(0.02)
        assert "unregister" not in registrar.calls
    until(lambda: "unregister" in registrar.calls)
    assert len(registrar.registered) == 2
    tier.forget([name(100)])
    assert put(tier, 101)  # the pages return to slots of the first size
    until(lambda: len(registrar.registered) == 3)
    tier.close()


def test_what_an_earlier_process_left_is_registered_when_it_is_found(registrar: FakeRegistrar, tmp_path: Path) -> None:
    tier = HostTier.open(tmp_path / "tier", 9 * STRIDE, memory=registered(registrar))
    for n in range(8):
        put(tier, n)
    tier.close()
    registrar.calls.clear()
    again = HostTier.open(tmp_path / "tier", 9 * STRIDE, memory=registered(registrar))
    until(lambda: reaches(again, 0) and reaches(again, 5))
    assert not reaches(again, 6), "one slot of its group has no pages"
    assert read(again, 5) == content(5)
    again.close()
    assert registrar.calls == [*["register register-memory"] * 2, *["unregister"] * 2]


def test_the_next_owner_does_not_wait_until_all_is_unregistered(tmp_path: Path) -> None:
    taken: list[int] = []

    class TakingRegistrar(FakeRegistrar):
        def unregister(self, address: int) -> str | None:
            taken.append(lock_directory(tmp_path / "tier"))
            os.close(taken[-1])
            return super().unregister(address)

    registrar = TakingRegistrar()
    tier = HostTier.open(tmp_path / "tier", 9 * STRIDE, memory=registered(registrar))
    assert all(put(tier, n) for n in range(9))
    assert tier.add_size(SIZE).wait(60)
    tier.close()
    assert len(taken) == 3


def test_a_tier_that_cannot_be_registered_is_used_all_the_same(
    registrar: FakeRegistrar, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registrar.limit = 1
    tier = HostTier.open(tmp_path / "tier", 10 * STRIDE, memory=registered(registrar))
    assert all(put(tier, n) for n in range(10))
    until(lambda: bool(caplog.records))
    assert [read(tier, n) == content(n) for n in range(10)] == [True] * 10
    assert (reaches(tier, 0), reaches(tier, 3)) == (True, False)
    assert caplog.text.count(REFUSAL) == 1
    tier.close()

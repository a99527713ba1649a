"""The disk tier: its content, its evictions, and failures of the disk."""

import errno
import itertools
import logging
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import pytest

from pilotlight.engine.kv.tier_protocol import TierError
from pilotlight.engine.kv.tiers import disk_tier
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from tests.engine.kv.tiers.faulty_files import FaultyFiles
from tests.engine.kv.tiers.test_host_tier import content, kill_in, name, numbers_in

SIZE = 1000
RECORD = SIZE + 64
LIMIT = 16 * 4 * RECORD  # sixteen segments of four blocks


def put(tier: DiskTier, n: int) -> bool:
    block = memoryview(content(n, SIZE))
    return tier.write(name(n), block, crc32(block))


def read(tier: DiskTier, n: int) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if tier.read(name(n), memoryview(into)) is not None else None


def reopen(tier: DiskTier, directory: Path) -> DiskTier:
    tier.close()
    opened = DiskTier.open(directory, LIMIT)
    opened.scan()
    return opened


@pytest.fixture
def files() -> FaultyFiles:
    return FaultyFiles()


@pytest.fixture
def tier(tmp_path: Path, files: FaultyFiles) -> Iterator[DiskTier]:
    opened = DiskTier.open(tmp_path, LIMIT, files=files)
    opened.scan()
    yield opened
    opened.close()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kv"))


def test_what_is_written_is_read_and_nothing_is_written_twice(tier: DiskTier, tmp_path: Path) -> None:
    assert all(put(tier, n) for n in range(10))
    assert not put(tier, 3)
    assert [read(tier, n) == content(n, SIZE) for n in range(11)] == [True] * 10 + [False]
    assert [path.stat().st_size for path in segments(tmp_path)] == [4 * RECORD, 4 * RECORD, 2 * RECORD]
    assert tier.used_bytes == 10 * RECORD


def test_the_limit_holds_and_the_segment_unused_for_longest_goes_first(tier: DiskTier, tmp_path: Path) -> None:
    for n in range(64):
        assert put(tier, n)
    assert read(tier, 2) is not None  # marks its segment as used
    for n in range(64, 68):
        assert put(tier, n)
        assert sum(path.stat().st_size for path in segments(tmp_path)) == tier.used_bytes <= LIMIT
    assert [n for n in range(68) if name(n) not in tier] == [4, 5, 6, 7]
    assert len(segments(tmp_path)) == 16


def test_the_next_process_finds_what_the_last_wrote_and_writes_on(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    tier.scan()
    for n in range(6):
        put(tier, n)
    tier = reopen(tier, tmp_path)
    assert [read(tier, n) == content(n, SIZE) for n in range(6)] == [True] * 6
    assert put(tier, 6)
    assert not put(tier, 0)
    tier = reopen(tier, tmp_path)
    assert [read(tier, n) == content(n, SIZE) for n in range(7)] == [True] * 7
    tier.close()


def test_a_lower_limit_is_met_at_the_next_start(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    for n in range(40):
        put(tier, n)
    tier.close()
    smaller = DiskTier.open(tmp_path, 8 * RECORD)
    smaller.scan()
    assert smaller.used_bytes <= 8 * RECORD
    assert [n for n in range(40) if name(n) in smaller] == list(range(32, 40))
    smaller.close()


def test_a_flipped_bit_is_noticed_and_the_block_forgotten_permanently(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    tier.scan()
    for n in range(4):
        put(tier, n)
    (file,) = segments(tmp_path)
    damaged = bytearray(file.read_bytes())
    damaged[RECORD + 64 + 500] ^= 4
    file.write_bytes(damaged)
    assert [read(tier, n) == content(n, SIZE) for n in range(4)] == [True, False, True, True]
    assert tier.num_corrupt == 1
    assert name(1) not in tier
    tier = reopen(tier, tmp_path)
    assert [name(n) in tier for n in range(4)] == [True, False, True, True]
    assert put(tier, 1)
    assert read(tier, 1) == content(1, SIZE)
    tier.close()


@pytest.mark.parametrize(("keep", "left"), [(2 * RECORD + 30, 2), (RECORD + 64 + 1, 1), (10, 0), (0, 0)])
def test_a_truncated_segment_keeps_what_is_whole(tmp_path: Path, keep: int, left: int) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    tier.scan()
    for n in range(4):
        put(tier, n)
    os.truncate(segments(tmp_path)[0], keep)
    assert read(tier, 3) is None, "damage is noticed while the tier is open too"
    tier = reopen(tier, tmp_path)
    assert [read(tier, n) == content(n, SIZE) for n in range(4)] == [n < left for n in range(4)]
    assert all(put(tier, n) for n in range(left, 4))
    tier = reopen(tier, tmp_path)
    assert [read(tier, n) == content(n, SIZE) for n in range(4)] == [True] * 4
    tier.close()


def test_a_segment_that_cannot_be_read_to_its_end_gives_what_was_found(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    for n in range(4):
        put(tier, n)
    tier.close()

    def unreadable(fd: int, size: int, offset: int) -> bytes:
        if offset >= 2 * RECORD:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pread(fd, size, offset)

    tier = DiskTier.open(tmp_path, LIMIT, files=FaultyFiles(pread=unreadable))
    tier.scan()
    assert [read(tier, n) == content(n, SIZE) for n in range(4)] == [True, True, False, False]
    assert tier.used_bytes == 2 * RECORD
    assert put(tier, 2)
    tier.close()


def test_found_blocks_are_read_while_the_rest_is_looked_up(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    for n in range(4):
        put(tier, n)
    tier.close()
    found = []

    def looked_at(fd: int, size: int, offset: int) -> bytes:
        if offset:
            found.append(read(tier, offset // RECORD - 1))
        return os.pread(fd, size, offset)

    tier = DiskTier.open(tmp_path, LIMIT, files=FaultyFiles(pread=looked_at))
    tier.scan()
    assert found == [content(n, SIZE) for n in range(3)]
    tier.close()


def test_a_damaged_header_costs_its_own_block_alone(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path, LIMIT)
    tier.scan()
    for n in range(8):
        put(tier, n)
    file = segments(tmp_path)[0]
    damaged = bytearray(file.read_bytes())
    damaged[2 * RECORD + 41] ^= 1  # in the length field of the third record
    file.write_bytes(damaged)
    tier = reopen(tier, tmp_path)
    assert [name(n) in tier for n in range(8)] == [True, True, False, True, True, True, True, True]
    assert [read(tier, n) == content(n, SIZE) for n in range(8)] == [n != 2 for n in range(8)]
    assert tier.num_corrupt == 1
    tier.close()


def test_a_full_disk_first_costs_the_oldest_blocks_then_the_new_one(tier: DiskTier, files: FaultyFiles) -> None:
    for n in range(6):
        put(tier, n)
    full_times(files, 1)
    assert put(tier, 6)
    assert [n for n in range(7) if name(n) in tier] == [4, 5, 6]
    full_times(files, 1)
    assert not put(tier, 7), "no block is left that could be evicted"
    assert tier.num_errors == 1
    assert put(tier, 8)
    assert [read(tier, n) == content(n, SIZE) for n in (4, 5, 6, 8)] == [True] * 4


def test_a_used_up_quota_is_a_full_disk(tier: DiskTier, files: FaultyFiles) -> None:
    for n in range(6):
        put(tier, n)
    refusals = iter([OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))])

    def write(fd: int, parts: list[bytes], offset: int) -> int:
        for refusal in refusals:
            raise refusal
        return os.pwritev(fd, parts, offset)

    files.pwritev = write
    assert put(tier, 6)
    assert [n for n in range(7) if name(n) in tier] == [4, 5, 6]


def full_times(files: FaultyFiles, times: int) -> None:
    """Make the next `times` writes stop in the middle, as on a full disk."""
    left = iter(range(times))

    def write_half(fd: int, parts: list[bytes], offset: int) -> int:
        if next(left, None) is None:
            return os.pwritev(fd, parts, offset)
        return os.pwrite(fd, b"".join(bytes(part) for part in parts)[:500], offset)

    files.pwritev = write_half


def test_a_disk_that_keeps_refusing_is_let_be_and_that_is_said_once(
    tier: DiskTier, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, 0)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files.pwritev = refuse
    assert not any(put(tier, n) for n in range(1, 10))
    files.pwritev = os.pwritev
    assert tier.num_errors == 3
    assert not tier.is_writable
    assert not put(tier, 20)
    assert caplog.text.count("no longer written to") == 1
    assert read(tier, 0) == content(0, SIZE), "stored blocks may still be read"


def test_a_disk_that_was_full_is_written_to_again_when_it_has_room(
    tmp_path: Path, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    tier = DiskTier.open(tmp_path, LIMIT, clock=lambda: now[0], files=files)
    tier.scan()
    tries: list[float] = []

    def full(*_: object) -> int:
        tries.append(now[0])
        raise OSError(errno.ENOSPC, "No space left on device")

    files.pwritev = full
    for second in range(1000):
        now[0] = float(second)
        assert not put(tier, second)
    files.pwritev = os.pwritev
    assert tries[:3] == [0.0, 1.0, 2.0]
    assert [round(b - a) for a, b in itertools.pairwise(tries[2:])] == [10, 20, 40, 80, 160, 300, 300]
    assert "no longer written to" in caplog.text
    caplog.clear()
    now[0] += 300
    with caplog.at_level(logging.WARNING):
        assert put(tier, 5000)
        assert put(tier, 5001)
    assert caplog.messages == [f"the disk KV tier at {tmp_path} is written to again"]
    tier.close()


def test_a_disk_that_cannot_be_read_is_let_be(
    tier: DiskTier, files: FaultyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(10):
        put(tier, n)

    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    files.preadv = refuse
    assert [read(tier, n) for n in range(10)] == [None] * 10
    assert tier.num_errors == 3
    assert caplog.text.count("no longer read") == 1


@pytest.mark.process
def test_a_limit_of_the_system_on_file_sizes_is_an_error_like_any_other(tmp_path: Path) -> None:
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from pilotlight.engine.kv.tiers import disk_tier\n"
        "from tests.engine.kv.tiers.test_disk_tier import LIMIT, RECORD, put, read\n"
        "tier = disk_tier.DiskTier.open(Path(sys.argv[1]), LIMIT)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (3 * RECORD - 100, 3 * RECORD - 100))\n"
        "results = [put(tier, n) for n in range(9)]\n"
        "assert results == [True, True] + [False] * 7, results\n"
        "assert read(tier, 1) is not None and not tier.is_writable\n"
    )
    root = Path(disk_tier.__file__).parents[4]
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert segments(tmp_path)[0].stat().st_size == 2 * RECORD


ENDLESS = """
import sys
from pathlib import Path
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.segment_file import BlockRecord, Segment
from tests.engine.kv.tiers.test_disk_tier import LIMIT, put
tier = DiskTier.open(Path(sys.argv[1]), LIMIT)
tier.scan()
print('ready', flush=True)
for n in range(int(sys.argv[2]), 10**9): put(tier, n)
"""


@pytest.mark.process
def test_a_process_killed_at_any_time_leaves_a_tier_that_is_right(tmp_path: Path) -> None:
    for i in range(3):
        kill_in(ENDLESS, tmp_path, i * 10**6, after_s=0.02 * (i + 1))
        tier = DiskTier.open(tmp_path, LIMIT)
        tier.scan()
        assert len(tier) > 0
        for n in numbers_in(tier, range(0, (i + 1) * 10**6, 10**6)):
            assert read(tier, n) == content(n, SIZE)
        assert tier.used_bytes <= LIMIT
        tier.close()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TierError, match="Not a directory"):
        DiskTier.open(tmp_path / "file" / "tier", LIMIT)


def test_no_other_user_may_read_it_and_strangers_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "segment-notes.kv").write_text("mine")
    tier = DiskTier.open(tmp_path, LIMIT)
    tier.scan()
    put(tier, 1)
    assert stat.S_IMODE(segments(tmp_path)[0].stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    assert (tmp_path / "segment-notes.kv").read_text() == "mine"
    tier.close()

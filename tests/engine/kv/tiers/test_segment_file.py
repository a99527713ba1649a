"""Segment files: exactly the whole records are found again, whichever part of the file was cut off or damaged."""

import errno
import os
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.kv.tiers.segment_file import HEADER_BYTES, BlockRecord, Segment
from tests.engine.kv.tiers.faulty_files import FaultyFiles

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=4)
Found = dict[bytes, tuple[int, int, int]]


def name(number: int) -> bytes:
    return bytes([number + 1]) * 32


def content(number: int, size: int) -> bytes:
    return bytes([number + 101]) * size


def written(folder: Path, sizes: list[int]) -> tuple[Path, Found]:
    path = folder / "segment.kv"
    path.unlink(missing_ok=True)
    segment, expected = Segment.create(path), Found()
    for number, size in enumerate(sizes):
        block = content(number, size)
        record = segment.append(name(number), memoryview(block), crc32(block))
        assert record == BlockRecord(segment, segment.num_bytes + HEADER_BYTES, size, crc32(block))
        segment.num_bytes += HEADER_BYTES + size
        expected[name(number)] = record[1:]
    segment.close()
    segment.close()
    return path, expected


def scanned(path: Path) -> tuple[Found, int, Segment]:
    """Return the records of a segment, the number of damaged parts, and the segment."""
    segment, found, damaged = Segment(path), Found(), 0
    for each in segment.scan():
        if each is None:
            damaged += 1
        else:
            assert each[1].segment is segment
            found[each[0]] = each[1][1:]
    return found, damaged, segment


@settings(deadline=None)
@given(SIZES)
def test_what_was_appended_is_found_and_read(sizes: list[int]) -> None:
    folder = Path(os.environ["SEGMENTS"])
    path, expected = written(folder, sizes)
    found, damaged, segment = scanned(path)
    assert (found, damaged, segment.num_bytes) == (expected, 0, path.stat().st_size)
    for number, size in enumerate(sizes):
        into = bytearray(size)
        assert BlockRecord(segment, *found[name(number)]).read(memoryview(into)) == size
        assert into == content(number, size)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set one folder for all examples of a property test."""
    monkeypatch.setenv("SEGMENTS", str(tmp_path))


@settings(deadline=None)
@given(SIZES, st.data())
def test_a_file_that_was_cut_has_its_whole_records_and_ends_after_them(sizes: list[int], draw: st.DataObject) -> None:
    path, expected = written(Path(os.environ["SEGMENTS"]), sizes)
    length = draw.draw(st.integers(0, path.stat().st_size - 1))
    os.truncate(path, length)
    whole = {one: record for one, record in expected.items() if record[0] + record[1] <= length}
    end = max((record[0] + record[1] for record in whole.values()), default=0)
    found, damaged, segment = scanned(path)
    assert (found, segment.num_bytes) == (whole, end)
    assert damaged == (length > end)
    assert path.exists() == (end > 0)
    if end:
        assert path.stat().st_size == end


@settings(deadline=None)
@given(SIZES, st.data())
def test_a_damaged_header_costs_its_own_record_and_no_byte_makes_another(sizes: list[int], draw: st.DataObject) -> None:
    path, expected = written(Path(os.environ["SEGMENTS"]), sizes)
    hit = draw.draw(st.integers(0, len(sizes) - 1))
    offset = list(expected.values())[hit][0]
    damaged = bytearray(path.read_bytes())
    damaged[offset - HEADER_BYTES + draw.draw(st.integers(0, HEADER_BYTES - 13))] ^= 1 << draw.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    found, runs, _ = scanned(path)
    assert found == {one: record for one, record in expected.items() if one != name(hit)}
    assert runs == 1


def test_a_record_that_is_blotted_out_keeps_its_place(tmp_path: Path) -> None:
    path, expected = written(tmp_path, [9, 8, 7])
    BlockRecord(Segment(path), *expected[name(1)]).blot_out()
    found, damaged, segment = scanned(path)
    assert (found, damaged) == ({one: expected[one] for one in (name(0), name(2))}, 0)
    assert segment.num_bytes == path.stat().st_size


@pytest.mark.parametrize("missing", [1, 9, 10])
def test_a_record_that_a_disk_did_not_write_whole_is_ignored(missing: int, tmp_path: Path) -> None:
    files = FaultyFiles(pwritev=lambda fd, parts, at: os.pwrite(fd, b"".join(parts)[:-missing], at))
    segment = Segment.create(tmp_path / "segment.kv", files)
    with pytest.raises(OSError, match="No space") as refused:
        segment.append(name(0), memoryview(content(0, 9)), 0)
    assert refused.value.errno == errno.ENOSPC
    assert (tmp_path / "segment.kv").stat().st_size > 0
    segment.drop_torn()
    assert (tmp_path / "segment.kv").stat().st_size == segment.num_bytes == 0
    segment.close()

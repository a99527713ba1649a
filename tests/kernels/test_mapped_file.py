"""Parts of several files are mapped as one piece of memory, at any offset within pages."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.mapped_file import MappedParts, OpenRange, can_join

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere files are read"),
]

PAGE = mmap.PAGESIZE


@pytest.fixture
def fds(tmp_path: Path) -> list[int]:
    found = []
    for i in range(2):
        (tmp_path / str(i)).write_bytes(os.urandom(40 * PAGE + 123))
        found.append(os.open(tmp_path / str(i), os.O_RDONLY))
    return found


@pytest.mark.parametrize(
    "ranges",
    [
        [(0, 0, PAGE), (1, 3 * PAGE, 2 * PAGE), (0, 7 * PAGE, PAGE)],
        [(0, 100, 2 * PAGE), (0, 9 * PAGE + 100, 4 * PAGE), (1, 100, 30 * PAGE + 5)],
        [(0, 100, 50), (1, 150, 20), (0, 5 * PAGE + 170, 3 * PAGE)],  # both ends are in the middle of a page
        [(1, PAGE - 1, 1), (0, 2 * PAGE, PAGE), (1, 40 * PAGE, 123)],  # the last part ends with its file
    ],
)
def test_parts_of_files_follow_one_another(fds: list[int], ranges: list[tuple[int, int, int]]) -> None:
    parts = [OpenRange(fds[file], start, count) for file, start, count in ranges]
    assert can_join([(start, count) for _, start, count in ranges])
    expected = b"".join(os.pread(part.fd, part.num_bytes, part.start) for part in parts)
    mapped = MappedParts(parts)
    for fd in fds:
        os.close(fd)
    memory = pages.tensor_of(mapped)
    mapped.populate()
    del mapped
    assert bytes(memory.tolist()) == expected
    assert memory.data_ptr() % PAGE == ranges[0][1] % PAGE


def test_parts_that_begin_elsewhere_in_a_page_cannot_be_joined() -> None:
    assert not can_join([(0, PAGE), (PAGE + 8, PAGE)])
    assert not can_join([(8, PAGE + 8), (PAGE + 8, PAGE)])


def test_a_file_that_has_been_cut_off_is_an_error(fds: list[int]) -> None:
    with pytest.raises(OSError, match="was truncated"):
        MappedParts([OpenRange(fds[0], 38 * PAGE + 8, 3 * PAGE), OpenRange(fds[1], 8 + 3 * PAGE, PAGE)])

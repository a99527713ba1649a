"""Whether mapped files' values are numbers, asked in a thread of the C library's, which needs neither torch nor Python's lock.

Knows ranges of bytes; refuses to know tensors and files' formats.
"""

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from kernels.cpu.mapped_file import MappedFile


class Range(NamedTuple):
    """Values of one type, one behind the other."""

    begin: int
    end: int
    item_bytes: int  # 2: bf16; 4: fp32


class ToLookAt(NamedTuple):
    mapped: MappedFile
    fd: int  # open until the look has ended
    ranges: Sequence[Range]


class _File(ctypes.Structure):
    _fields_ = (
        ("mapped", ctypes.c_void_p),
        ("fd", ctypes.c_long),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_long),
        ("looked", ctypes.c_long),
    )


class LookingAhead:
    """One look at files, in order, under way from the beginning. The first value that is no number ends it."""

    def __init__(self, library: Path, files: Sequence[ToLookAt]) -> None:
        """Raises OSError or AttributeError for a library that is damaged."""
        opened = ctypes.CDLL(str(library))
        begin, self._end = opened.look_ahead, opened.look_ahead_end
        pointer = ctypes.c_void_p
        begin.argtypes, begin.restype = [pointer, ctypes.c_long, pointer], pointer
        self._end.argtypes, self._end.restype = [pointer], None
        self._files = files
        self._stop = ctypes.c_int()
        self._ranges = [_numbers(file.ranges) for file in files]
        self._described = (_File * len(files))(
            *(
                _File(file.mapped.address, file.fd, ctypes.addressof(ranges), len(file.ranges), 0)
                for file, ranges in zip(files, self._ranges, strict=True)
            )
        )
        self._looker = begin(self._described, len(files), ctypes.addressof(self._stop))

    def end(self) -> list[int]:
        """Stops it within a megabyte, if it has not ended. Where it came to in each file: every value in `ranges` before that is a number."""
        self._stop.value = 1
        looker, self._looker = self._looker, None
        if looker is not None:
            self._end(looker)
        return [file.looked for file in self._described]


def _numbers(ranges: Sequence[Range]) -> "ctypes.Array[ctypes.c_long]":
    return (ctypes.c_long * (3 * len(ranges)))(*(number for one in ranges for number in one))

"""The system's calls that read, write and allocate files at an offset.

Tests replace the object with those that read and write.
"""

import os
from collections.abc import Sequence
from typing import Protocol


class FileCalls(Protocol):
    def pread(self, fd: int, length: int, offset: int, /) -> bytes: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, /) -> int: ...


FILE_CALLS: FileCalls = os


def allocate_pages(fd: int, offset: int, num_bytes: int) -> None:
    """Allocate a file's pages, on systems that can. Raises OSError if the file system is full.

    A write to a mapped page that cannot be allocated would end in a SIGBUS.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, offset, num_bytes)

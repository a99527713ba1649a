"""The system's calls that read and write files at an offset, as an object that can be replaced."""

import os
from collections.abc import Sequence
from typing import Protocol


class FileCalls(Protocol):
    def pread(self, fd: int, length: int, offset: int, /) -> bytes: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[bytes | memoryview], offset: int, /) -> int: ...


FILE_CALLS: FileCalls = os

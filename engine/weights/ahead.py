"""A model's weights mapped and looked at before anybody has asked for it: beside the import of torch, when the site's file says which is the first.

What was found is only believed of files that are the same when the load takes them over, and bad news not at all: the load then looks itself, and
says what it finds. Knows files; refuses to know models, and torch.
"""

import atexit
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from engine.errors import CheckpointError
from engine.weights.file_system import is_local
from engine.weights.reader import StoredTensor, index_checkpoint, packed_file
from kernels.cpu.build import BuildError, find_library
from kernels.cpu.looking_ahead import LookingAhead, Range, ToLookAt
from kernels.cpu.mapped_file import MappedFile

# From here on a checkpoint's own pages are used, where it has them as the model wants them. Less is copied in a tenth of a second, and is then in
# the memory it will stay in.
IN_PLACE_FROM_BYTES = 128 << 20
IN_PLACE_SHARE = 0.5  # of the bytes, at least

_ITEM_BYTES = {"BF16": 2, "F32": 4}
_NO_VALUES = frozenset({"U8", "I8", "I32", "I64"})  # whatever their bits are, they are numbers
_NAMES = {"bfloat16": "BF16", "float32": "F32"}

Identity = tuple[int, ...]


class Taken(NamedTuple):
    """A file that was mapped ahead."""

    mapped: MappedFile
    looked: int  # values that end here or before are numbers


class _Opened(NamedTuple):
    identity: Identity
    to_look_at: ToLookAt


class Ahead:
    """Mapped files, and the look at them."""

    def __init__(self, directory: Path, dtype: str) -> None:
        """Raises what a load of this directory would meet as well."""
        self._opened: list[_Opened] = []
        self._looking: LookingAhead | None = None
        self._found: dict[Identity, Taken] = {}
        try:
            library = find_library()
            if library is not None:
                self._opened = [_open(file, identity, ranges) for file, identity, ranges in _plan(directory, dtype)]
                self._looking = LookingAhead(library, [opened.to_look_at for opened in self._opened])
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        if self._looking is not None:
            looked = self._looking.end()
            for (identity, (mapped, _, _)), end in zip(self._opened, looked, strict=True):
                self._found[identity] = Taken(mapped, end)
            self._looking = None
        for opened in self._opened:
            os.close(opened.to_look_at.fd)
        self._opened = []

    def take(self, file: Path) -> Taken | None:
        """None: it was not mapped, or has changed since. Once for each file; the look ends."""
        self.end()
        return self._found.pop(_identity(file.stat()), None)


def _open(file: Path, identity: Identity, ranges: Sequence[Range]) -> _Opened:
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if _identity(status) != identity:
            raise CheckpointError(f"{file} was changed while it was opened")
        return _Opened(identity, ToLookAt(MappedFile(fd, status.st_size), fd, ranges))
    except BaseException:
        os.close(fd)
        raise


def _plan(directory: Path, dtype: str) -> Iterator[tuple[Path, Identity, Sequence[Range]]]:
    """Files with what is to be looked at; none where the load will not use their pages (engine/weights/supply.py)."""
    if not is_local(directory) or packed_file(directory) is not None:
        return
    before = {file: _identity(file.stat()) for file in directory.glob("*.safetensors")}
    if sum(size for _, _, size, *_ in before.values()) < IN_PLACE_FROM_BYTES:
        return
    tensors = sorted(index_checkpoint(directory).values(), key=lambda stored: (stored.file.name, stored.start))
    if not _will_be_in_place(tensors, dtype):
        return
    for file, stored in groupby(tensors, key=lambda stored: stored.file):
        ranges = _ranges(list(stored))
        if not ranges or file not in before:
            return
        yield file, before[file], ranges


def _will_be_in_place(tensors: Sequence[StoredTensor], dtype: str) -> bool:
    num_bytes = {name: 0 for name in ("BF16", "F32")}
    for stored in tensors:
        num_bytes[stored.dtype] = num_bytes.get(stored.dtype, 0) + stored.end - stored.start
    has_only_f32 = all(name in ("F32", "I64") for name, count in num_bytes.items() if count)
    wanted = _NAMES.get(dtype, "F32" if has_only_f32 else "BF16")
    return num_bytes[wanted] >= IN_PLACE_SHARE * sum(num_bytes.values())


def _ranges(tensors: Sequence[StoredTensor]) -> list[Range]:
    """Up to the first tensor of a type that is not known here."""
    if any(after.start < before.end for before, after in pairwise(tensors)):
        return []
    ranges = []
    for stored in tensors:
        if stored.dtype in _ITEM_BYTES and stored.end > stored.start:
            ranges.append(Range(stored.start, stored.end, _ITEM_BYTES[stored.dtype]))
        elif stored.dtype not in _ITEM_BYTES and stored.dtype not in _NO_VALUES:
            break
    return ranges


def _identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


_ahead: Ahead | None = None


def begin(directory: Path, dtype: str) -> None:
    """At most once in a process. Whatever is wrong, the load will meet it too, and say so."""
    global _ahead
    if _ahead is not None or not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError, BuildError, CheckpointError):
        _ahead = Ahead(directory, dtype)
        atexit.register(drop)  # before the interpreter unmaps what is looked at


def take(file: Path) -> Taken | None:
    return None if _ahead is None else _ahead.take(file)


def drop() -> None:
    """What has not been taken is not wanted."""
    global _ahead
    ahead, _ahead = _ahead, None
    if ahead is not None:
        ahead.end()

"""One memory-mapped file of fixed-size slots, the byte format of the host tier.

The file stays valid if its process is killed. A slot contains one KV block. Its header marks it as valid only after the body is complete: the mark is
cleared, the body written, the header written, and the mark set, in program order, which a killed process preserves. Opening reads only headers; a
body is verified by its checksum when it is first read. Bodies are registered with the host's device in groups of slots, once all slots of a group
have pages: registering allocates missing pages, and memory must not stay registered when it is freed. host_tier.py decides which slots to keep.

file header | slot header * num_slots | body * num_slots        each part begins on a page, and so does each body
"""

import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch
from isal.isal_zlib import crc32

from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.support.file_calls import FILE_CALLS, FileCalls

log = logging.getLogger(__name__)

PAGE = mmap.PAGESIZE
_FILE_HEADER = struct.Struct("<8sIQQ")  # magic, version, slot bytes, slots
_MAGIC, _VERSION = b"PLkvslot", 1
_MARK = 0x4B56_4F4B
_MARK_STRUCT = struct.Struct("<I")
# mark, checksum of the next two fields, hash, checksum of the body, unused, time of last use. The mark is written last.
_SLOT_HEADER = struct.Struct("<II32sI4xd8x")
_NAME = struct.Struct("<32sI")  # the fields that the header's checksum covers
_LAST_USE = struct.Struct("<d")
_NAME_OFFSET, _LAST_USE_OFFSET = 8, 48


class FoundSlot(NamedTuple):
    number: int
    block_hash: bytes
    checksum: int
    last_use: float


def slot_file_path(directory: Path, slot_bytes: int) -> Path:
    return directory / f"slots-{slot_bytes}.kv"


class SlotFile:
    """The file at `path`, opened if its slots have the same size and number, else created anew."""

    def __init__(self, path: Path, slot_bytes: int, num_slots: int, memory: SlotMemory) -> None:
        assert _SLOT_HEADER.size == 64
        self.slot_bytes = slot_bytes
        self.num_slots = num_slots
        self.num_corrupt = 0  # damaged headers that were found, of the file or of slots
        self.stride = _whole_pages(slot_bytes)
        self._bodies = PAGE + _whole_pages(num_slots * _SLOT_HEADER.size)
        self._size = self._bodies + num_slots * self.stride
        self._allocate = memory.allocate
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if not self._is_of_this_geometry():
                if self._is_damaged():
                    self.num_corrupt += 1
                    log.warning("%s is damaged; it begins empty", path)
                self._make_anew()
            self._map = mmap.mmap(self._fd, self._size)
        except BaseException:
            os.close(self._fd)
            raise
        self._group = max(1, memory.piece_bytes // self.stride)  # slots per registration
        self._has_pages = bytearray(num_slots)
        bodies = torch.frombuffer(self._map, dtype=torch.uint8)[self._bodies :]
        self.registered = RegisteredMemory(bodies, memory.device, self._group * self.stride, memory.registrar)

    def find(self) -> list[FoundSlot]:
        """Return the slots with valid headers; give the pages of all other slots back to the system."""
        found = []
        for index in range(self.num_slots):
            at = self._header_at(index)
            mark, own_checksum, block_hash, checksum, last_use = _SLOT_HEADER.unpack_from(self._map, at)
            if mark == _MARK and own_checksum == crc32(_NAME.pack(block_hash, checksum)):
                found.append(FoundSlot(index, block_hash, checksum, last_use))
                self._has_pages[index] = True
            else:
                self.num_corrupt += mark != 0  # damaged: a kill leaves the mark cleared or the header complete
                self._has_pages[index] = False
        for has_pages, run in groupby(range(self.num_slots), self._has_pages.__getitem__):
            if not has_pages:
                slots = list(run)
                self._discard_pages(slots[0], slots[-1])
        for index in range(0, self.num_slots, self._group):
            self._register_group(index)
        return found

    def body(self, index: int) -> memoryview:
        start = self.offset_of(index)
        return memoryview(self._map)[start : start + self.slot_bytes]

    def offset_of(self, index: int) -> int:
        """Return the offset of a slot's body in the file."""
        return self._bodies + index * self.stride

    @property
    def memory(self) -> memoryview:
        """The whole file."""
        return memoryview(self._map)

    def provide(self, index: int) -> None:
        """Allocate pages for a slot's body.

        Raises OSError if the file system is full, in which case a write to the map would end in a SIGBUS.
        """
        if self._has_pages[index]:
            return
        self._allocate(self._fd, self.offset_of(index), self.stride)
        self._has_pages[index] = True
        self._register_group(index)

    def clear(self, index: int) -> None:
        """Make a slot unfindable, before its body changes."""
        _MARK_STRUCT.pack_into(self._map, self._header_at(index), 0)

    def commit(self, index: int, block_hash: bytes, checksum: int, last_use: float) -> None:
        """Write the header of a slot whose body is complete."""
        at = self._header_at(index)
        _SLOT_HEADER.pack_into(
            self._map, at, 0, crc32(_NAME.pack(block_hash, checksum)), block_hash, checksum, last_use
        )
        _MARK_STRUCT.pack_into(self._map, at, _MARK)

    def note_use(self, index: int, last_use: float) -> None:
        _LAST_USE.pack_into(self._map, self._header_at(index) + _LAST_USE_OFFSET, last_use)

    def give_back(self, index: int) -> None:
        """Empty a slot and return its memory to the system."""
        self.clear(index)
        self._has_pages[index] = False
        # Unregister before discarding the pages: a device would keep using the pages that it has registered.
        self.registered.release(index * self.stride, (index + 1) * self.stride)
        self._discard_pages(index, index)

    def close(self) -> None:
        self.registered.close()
        with suppress(BufferError):  # a body is still in use: the map is closed when its last view is released
            self._map.close()
        os.close(self._fd)

    def _header_at(self, index: int) -> int:
        return PAGE + index * _SLOT_HEADER.size

    def _is_of_this_geometry(self) -> bool:
        header = os.pread(self._fd, _FILE_HEADER.size, 0)
        return header == self._file_header() and os.fstat(self._fd).st_size == self._size

    def _is_damaged(self) -> bool:
        """Return whether the file is damaged. A new file, or a file with another limit or version, is not."""
        header = os.pread(self._fd, _FILE_HEADER.size, 0).ljust(_FILE_HEADER.size, b"\0")
        if not any(header):  # a new file, or its process was killed before it wrote the header
            return False
        magic, version, slot_bytes, num_slots = _FILE_HEADER.unpack(header)
        if (magic, slot_bytes) != (_MAGIC, self.slot_bytes):
            return True
        bodies = PAGE + _whole_pages(num_slots * _SLOT_HEADER.size)
        return bool(version == _VERSION and os.fstat(self._fd).st_size != bodies + num_slots * self.stride)

    def _make_anew(self) -> None:
        os.ftruncate(self._fd, 0)
        os.ftruncate(self._fd, self._size)  # sparse: a body costs no memory before `provide`
        self._allocate(self._fd, 0, self._bodies)
        os.pwrite(self._fd, self._file_header(), 0)

    def _file_header(self) -> bytes:
        return _FILE_HEADER.pack(_MAGIC, _VERSION, self.slot_bytes, self.num_slots)

    def _register_group(self, index: int) -> None:
        """Register the slot's group with the device if all slots of the group have pages."""
        first = index // self._group * self._group
        last = min(first + self._group, self.num_slots)
        if self._has_pages.find(False, first, last) < 0:
            self.registered.register(first * self.stride, last * self.stride)

    def _discard_pages(self, first: int, last: int) -> None:
        if hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # a file system without support for holes keeps the pages
                start = self._bodies + first * self.stride
                self._map.madvise(mmap.MADV_REMOVE, start, (last + 1 - first) * self.stride)


class SlotFileReader:
    """Another process's file, read slot by slot while that process uses it."""

    def __init__(self, directory: Path, slot_bytes: int, files: FileCalls = FILE_CALLS) -> None:
        """Open the file. Raises OSError."""
        self._files = files
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        self._fd = os.open(slot_file_path(directory, slot_bytes), flags)
        self._slot_bytes = slot_bytes
        # The file may still be shorter than a header, because its owner is creating it.
        header = os.pread(self._fd, _FILE_HEADER.size, 0).ljust(_FILE_HEADER.size, b"\0")
        magic, version, size, self._num_slots = _FILE_HEADER.unpack(header)
        if (magic, version, size) != (_MAGIC, _VERSION, slot_bytes):
            os.close(self._fd)
            raise OSError(errno.EINVAL, "it is not a file of slots of this size")
        self._bodies = PAGE + _whole_pages(self._num_slots * _SLOT_HEADER.size)

    def read(self, index: int, block_hash: bytes, into: memoryview) -> bool:
        """Fill `into` with a slot's body; return False unless the slot had this block throughout the read.

        The owner clears a header before it changes the body, so the header is checked before and after.
        """
        if not 0 <= index < self._num_slots or not self._holds(index, block_hash):
            return False
        start = self._bodies + index * _whole_pages(self._slot_bytes)
        num_read = self._files.preadv(self._fd, [into], start)
        return num_read == self._slot_bytes and self._holds(index, block_hash)

    def close(self) -> None:
        os.close(self._fd)

    def _holds(self, index: int, block_hash: bytes) -> bool:
        header = os.pread(self._fd, _SLOT_HEADER.size, PAGE + index * _SLOT_HEADER.size)
        if len(header) < _SLOT_HEADER.size:
            return False
        mark, own_checksum, found, checksum, _ = _SLOT_HEADER.unpack(header)
        return bool(mark == _MARK and found == block_hash and own_checksum == crc32(_NAME.pack(found, checksum)))


def lock_directory(directory: Path, patience_s: float = 0.0) -> int:
    """Lock a directory until the returned descriptor is closed or the process ends.

    Raises OSError with a reason if another process holds the lock for longer than `patience_s`.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = os.lstat(directory)
    if not os.path.isdir(directory) or os.path.islink(directory) or state.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is not a directory owned by this user", str(directory))
    if state.st_mode & 0o077:
        os.chmod(directory, 0o700)
    fd = os.open(directory / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except OSError as error:
            if time.monotonic() >= deadline:
                os.close(fd)
                raise BlockingIOError(errno.EWOULDBLOCK, "another engine host is using it", str(directory)) from error
        time.sleep(0.02)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE

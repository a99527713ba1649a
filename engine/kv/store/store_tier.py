"""The store tier: KV blocks of all hosts and sites of a cluster, in a Mooncake Store, by name.

A stored block is a header (magic, checksum, name, size) and its bytes. Its checksum is verified when it is read. The store never overwrites: a bad
block is removed, so that a good one can replace it. Connections are not authenticated: any machine that reaches a member's port can read and write
all blocks, so a private network is required. store_thread.py reads for the sequences that wait.
"""

import ctypes
import logging
import secrets
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

from isal.isal_zlib import crc32

from pilotlight.engine.kv.store.mooncake_package import bound_waits

log = logging.getLogger(__name__)

BATCH_BYTES = 8 << 20  # most bytes per call, which bounds how long a cancelled read still takes
_HEADER = struct.Struct("<8sI32sQ")  # magic, checksum of the block, its name, its bytes
_MAGIC = b"PLkvblk1"
_KEY = "pilotlight/"
_IDENTITY = _KEY + "identity"
_NO_SUCH_KEY, _LARGER_THAN_ASKED = -704, -600
_ANSWER_S = 10.0  # timeout of the master's answer, including a second to import the package on a busy machine
_PACKAGE_BUFFER_BYTES = 16 << 20  # the package's own buffer, of the least size allowed; our transfers do not use it


class StoreError(Exception):
    """An operation of the store failed; the message names the operation."""


class StoredBlock(NamedTuple):
    name: bytes
    memory: memoryview
    checksum: int


class StoreTier:
    """A member of the store that contributes no memory. One thread may read while another one writes."""

    def __init__(self, store: Any) -> None:
        """Use the store object of Mooncake's package; it is closed with this tier."""
        self.num_corrupt = 0
        self._store = store
        self._reads = _Buffer(self._store)
        self._writes = _Buffer(self._store)

    @classmethod
    def join(cls, master: str) -> Self:
        """Join the store. `master`: HOST:PORT of Mooncake's master.

        Raises StoreError if the master does not answer, or Mooncake is not installed.
        """
        return cls(open_member(master, own_address(master), segment_bytes=0))

    def identity(self) -> str:
        """Return the store's random name, which is independent of its address; empty if there is none.

        The first member puts the name there; later puts have no effect. A store that lost its content gets another name; a full one may have none.
        """
        self._store.put(_IDENTITY, secrets.token_hex(8).encode())
        found: bytes = self._store.get(_IDENTITY)
        return found.decode("ascii", "replace") if len(found) == 16 else ""

    def find(self, names: Sequence[bytes]) -> list[bytes]:
        """Return those of the names that are stored according to the master. Raises StoreError.

        The master drops the blocks of a lost member only after seconds.
        """
        answers = self._store.batch_is_exist([_key(name) for name in names])
        if len(answers) != len(names) or any(answer < 0 for answer in answers):
            raise StoreError(f"its master cannot list what is stored (error {min(answers, default=0)})")
        return [name for name, answer in zip(names, answers, strict=True) if answer]

    def read(self, names: Sequence[bytes], into: Sequence[memoryview]) -> list[int | None]:
        """Fill memory with blocks; return checksums, None for missing or damaged blocks. Raises StoreError."""
        views = self._reads.views([_HEADER.size + len(memory) for memory in into])
        addresses, sizes = [view.address for view in views], [len(view.memory) for view in views]
        answers = self._store.batch_get_into([_key(name) for name in names], addresses, sizes)
        if errors := [answer for answer in answers if answer < 0 and answer not in (_NO_SUCH_KEY, _LARGER_THAN_ASKED)]:
            raise StoreError(f"blocks cannot be read (error {errors[0]})")
        found: list[int | None] = []
        for name, memory, view, num_read in zip(names, into, views, answers, strict=True):
            is_missing = num_read == _NO_SUCH_KEY
            found.append(None if is_missing else self._checked(name, memory, view.memory[: max(0, num_read)]))
        return found

    def write(self, blocks: Sequence[StoredBlock]) -> None:
        """Store blocks; blocks that exist stay unchanged. Raises StoreError if one could not be stored."""
        views = self._writes.views([_HEADER.size + len(block.memory) for block in blocks])
        for block, view in zip(blocks, views, strict=True):
            _HEADER.pack_into(view.memory, 0, _MAGIC, block.checksum, block.name, len(block.memory))
            view.memory[_HEADER.size :] = block.memory
        keys = [_key(block.name) for block in blocks]
        answers = self._store.batch_put_from(
            keys, [view.address for view in views], [len(view.memory) for view in views]
        )
        if errors := [answer for answer in answers if answer < 0]:
            raise StoreError(f"{len(errors)} of {len(blocks)} blocks cannot be stored (error {errors[0]})")

    def remove(self, names: Iterable[bytes]) -> None:
        for name in names:
            self._store.remove(_key(name), True)

    def close(self) -> None:
        self._store.close()

    def _checked(self, name: bytes, memory: memoryview, stored: memoryview) -> int | None:
        """Copy a stored block to `memory` and return its checksum; remove a bad block and return None."""
        if len(stored) == _HEADER.size + len(memory):
            magic, checksum, of, num_bytes = _HEADER.unpack_from(stored)
            body = stored[_HEADER.size :]
            if (magic, of, num_bytes) == (_MAGIC, name, len(memory)) and crc32(body) == checksum:
                memory[:] = body
                return int(checksum)
        self.num_corrupt += 1
        log.warning("a block of the KV store does not match its name; it is removed and recomputed")
        self.remove([name])
        return None


def open_member(master: str, own: str, segment_bytes: int) -> Any:
    """Join the store with `segment_bytes` of memory for it; return the package's store object.

    Raises StoreError.
    """
    bound_waits()
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StoreError(f"Mooncake cannot be used: {error}; pip install 'pilotlight-inference[mooncake]'") from None
    _require_answer(master, own)
    store = MooncakeDistributedStore()
    if code := store.setup(own, "P2PHANDSHAKE", segment_bytes, _PACKAGE_BUFFER_BYTES, "tcp", "", master):
        raise StoreError(f"Mooncake's master at {master} does not accept this process as a member (error {code})")
    return store


def _require_answer(master: str, own: str) -> None:
    """Raise StoreError if the master does not accept members now.

    A separate process tries to join, because joining holds Python's lock until the master answers, or forever if its name is wrong: the engine would
    stop meanwhile.
    """
    script = (
        "import os, sys; from mooncake.store import MooncakeDistributedStore as Store; "
        f'os._exit(abs(Store().setup(sys.argv[1], "P2PHANDSHAKE", 0, {_PACKAGE_BUFFER_BYTES}, "tcp", "", sys.argv[2])) % 255)'
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", script, own, master], capture_output=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise StoreError(f"Mooncake's master at {master} does not answer within {_ANSWER_S:g} s") from None
    except OSError as error:
        raise StoreError(f"Mooncake's master at {master} cannot be asked: {error}") from None
    if done.returncode:
        raise StoreError(f"Mooncake's master at {master} accepts no members (status {done.returncode})")


def own_address(master: str) -> str:
    """Return the local address from which this machine reaches the master. Raises StoreError."""
    host, _, port = master.rpartition(":")
    try:
        family, kind, *_, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:  # connecting a datagram socket sends nothing
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise StoreError(f"{master} is not an address of Mooncake's master: {error}") from None


class _View(NamedTuple):
    memory: memoryview
    address: int


class _Buffer:
    """Memory registered with the package for its transfers, used by one thread."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._bytes = bytearray()  # registered with the package unless empty

    def views(self, sizes: Sequence[int]) -> list[_View]:
        """Return consecutive views of these sizes, in bytes, which are valid until the next call."""
        if sum(sizes) > len(self._bytes):
            self._grow(max(sum(sizes), BATCH_BYTES))
        memory, views, start = memoryview(self._bytes), [], 0
        base = _address(self._bytes)
        for size in sizes:
            views.append(_View(memory[start : start + size], base + start))
            start += size
        return views

    def _grow(self, num_bytes: int) -> None:
        if self._bytes:
            self._store.unregister_buffer(_address(self._bytes))
        self._bytes, larger = bytearray(), bytearray(num_bytes)
        if self._store.register_buffer(_address(larger), num_bytes):
            raise StoreError(f"Mooncake could not register {num_bytes} bytes")
        self._bytes = larger


def _address(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _key(name: bytes) -> str:
    return _KEY + name.hex()

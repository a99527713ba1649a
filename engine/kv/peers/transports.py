"""The transports of blocks between hosts: a file in shared memory, the socket, or Mooncake's engine.

Each has two ends: the *offer* of the host that has the blocks, and the *transport* of the host that copies them. The reader verifies copies
(peer_thread.py). This module is independent of messages and threads.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pilotlight.engine.kv.peers.messages import PeerError
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.slot_file import SlotFileReader

if TYPE_CHECKING:
    from pilotlight.engine.kv.peers.mooncake import TransferEngine

INLINE, SHARED_MEMORY, MOONCAKE = "inline", "shared_memory", "mooncake"


class RemoteBlock(NamedTuple):
    name: bytes
    place: int  # number of the block at the peer, from the peer's `Offer.place_of`
    frame: bytes | None  # the block's bytes if they came with the message


class Offer(NamedTuple):
    """One transport by which a host offers its blocks."""

    kind: str
    address: str = ""  # the address at which a reader finds the memory
    engine: "TransferEngine | None" = None

    def place_of(self, slot: HostSlot) -> int:
        """Return the number by which a reader finds the block: its slot, or its address for Mooncake."""
        return slot.index if self.engine is None else self.engine.address_of(slot)

    def frame_of(self, slot: HostSlot) -> list[bytes]:
        """Return the frames to send with the block's announcement: its bytes if it is sent inline, else none."""
        return [bytes(slot.memory)] if self.kind == INLINE else []


class Transport(Protocol):
    def read(self, blocks: Sequence[RemoteBlock], into: Sequence[HostSlot]) -> None:
        """Copy blocks of one size. Raises PeerError if one of them is missing or incomplete."""

    def close(self) -> None: ...


class InlineTransport:
    """Blocks sent over the socket: the slowest transport, which all connected hosts have."""

    def read(self, blocks: Sequence[RemoteBlock], into: Sequence[HostSlot]) -> None:
        for block, slot in zip(blocks, into, strict=True):
            view = slot.memory
            if block.frame is None or len(block.frame) != len(view):
                size = "no" if block.frame is None else f"{len(block.frame)}"
                raise PeerError(f"a block of {len(view)} bytes came with {size} bytes")
            view[:] = block.frame

    def close(self) -> None:
        pass


class SharedMemoryTransport:
    """Blocks in a slot file of another host on this machine.

    The file is read, not mapped: access to a mapped file that another process truncates would kill this process.
    """

    def __init__(self, directory: Path) -> None:
        """Set the directory of slot files. Raises PeerError if this host cannot see it."""
        if not directory.is_dir():
            raise PeerError(f"{directory} cannot be seen from here")
        self._directory = directory
        self._files: dict[int, SlotFileReader] = {}  # files by the size of their slots

    def read(self, blocks: Sequence[RemoteBlock], into: Sequence[HostSlot]) -> None:
        for block, slot in zip(blocks, into, strict=True):
            try:
                if not self._file(slot.file.slot_bytes).read(block.place, block.name, slot.memory):
                    raise PeerError("a block was overwritten before it was read")
            except OSError as error:
                raise PeerError(f"the peer's blocks cannot be read: {error.strerror}") from None

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _file(self, slot_bytes: int) -> SlotFileReader:
        if slot_bytes not in self._files:
            self._files[slot_bytes] = SlotFileReader(self._directory, slot_bytes)
        return self._files[slot_bytes]


class MooncakeTransport:
    """Blocks that Mooncake's transfer engine reads from the peer's memory, over TCP or RDMA."""

    def __init__(self, engine: "TransferEngine", session: str) -> None:
        self._engine = engine
        self._session = session

    def read(self, blocks: Sequence[RemoteBlock], into: Sequence[HostSlot]) -> None:
        self._engine.read(self._session, [block.place for block in blocks], into)

    def close(self) -> None:
        pass


def open_transport(kind: str, address: str, engine: "TransferEngine | None" = None) -> Transport:
    """Return the transport that a server has chosen. Raises PeerError if it is not available here."""
    if kind == INLINE:
        return InlineTransport()
    if kind == SHARED_MEMORY:
        return SharedMemoryTransport(Path(address))
    if kind == MOONCAKE and engine is not None:
        return MooncakeTransport(engine, address)
    raise PeerError(f"there is no transport {kind!r} here")

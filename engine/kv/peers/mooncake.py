"""Mooncake's transfer engine: one host reads the registered memory of another, over TCP or RDMA.

Its connections are not authenticated: any machine that reaches the port of a host that uses it can read the KV blocks of that host's tier. So it is
used only if a site file enables it, and only between machines on a private network. This module is independent of the choice of blocks.
"""

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

from pilotlight.engine.kv.peers.messages import PeerError, TransportLostError
from pilotlight.engine.kv.store.mooncake_package import bound_waits
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.slot_file import SlotFile


class TransferEngine:
    def __init__(self, host: str) -> None:
        """Start the engine. `host`: this machine's address for its peers. Raises PeerError."""
        bound_waits()
        try:
            from mooncake.engine import TransferEngine as Engine
        except ImportError as error:
            raise PeerError(f"Mooncake cannot be used: {error}; pip install 'pilotlight-inference[mooncake]'") from None
        self._engine: Any = Engine()
        if self._engine.initialize(host, "P2PHANDSHAKE", "tcp", ""):
            raise PeerError(f"Mooncake cannot transfer blocks over TCP at {host}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._lock = threading.Lock()
        self._registered: dict[SlotFile, int] = {}  # file -> address of its memory

    def address_of(self, slot: HostSlot) -> int:
        """Return the address of a block's bytes, in memory that peers may read."""
        with self._lock:
            start = self._registered.get(slot.file)
            if start is None:
                start = self._registered[slot.file] = self._register(slot.file)
        return start + slot.file.offset_of(slot.index)

    def read(self, session: str, addresses: Sequence[int], into: Sequence[HostSlot]) -> None:
        """Fill slots from a peer's memory. Raises TransportLostError if the peer is unreachable."""
        own = [self.address_of(slot) for slot in into]
        sizes = [slot.file.slot_bytes for slot in into]
        if into and self._engine.batch_transfer_sync_read(session, own, list(addresses), sizes):
            raise TransportLostError(f"Mooncake could not read {len(into)} blocks from {session}")

    def _register(self, file: SlotFile) -> int:
        memory = file.memory
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._engine.register_memory(start, len(memory)):
            raise PeerError(f"Mooncake could not register {len(memory)} bytes")
        return start

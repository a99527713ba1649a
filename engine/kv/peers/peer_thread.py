"""Fetches blocks that other engine hosts compute into this host's tier, for waiting sequences.

All messages of a peer are checked: names against the request, bytes against their checksum, liveness by heartbeats and the socket's state. If a peer
refuses, falls silent, disconnects or sends wrong data, its reads end with the blocks received so far, and this host computes the rest. Messages are
handled in a separate thread. transports.py copies the bytes.
"""

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import zmq
from isal.isal_zlib import crc32

from pilotlight.engine.api.protocol import BlockSource
from pilotlight.engine.kv.peers.messages import (
    HEARTBEAT_S,
    PEER_VERSION,
    SILENCE_S,
    BlocksCopied,
    BlocksReady,
    FromReader,
    FromServer,
    NoMoreBlocks,
    PeerError,
    PeerHello,
    PeerReady,
    PeerRefused,
    ReadBlocks,
    ReadyBlock,
    StillThere,
    StopReading,
    TransportLostError,
    decode_from_server,
    encode,
)
from pilotlight.engine.kv.peers.transports import INLINE, SHARED_MEMORY, RemoteBlock, Transport, open_transport
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.tiers.tier_read import TierRead

if TYPE_CHECKING:
    from pilotlight.engine.api.keys import Keys
    from pilotlight.engine.kv.peers.mooncake import TransferEngine

log = logging.getLogger(__name__)

_IDLE_S = 60.0  # time after which the socket of an unused peer is closed
_AVOIDED_S = 60.0  # time for which a transport to a peer is avoided after it lost blocks


class PeerRead(TierRead):
    """A read of a chain that another host computes."""

    def __init__(
        self, host: HostTier, hashes: Sequence[bytes], block_bytes: int, source: BlockSource, identity: CacheIdentity
    ) -> None:
        super().__init__(host, hashes, block_bytes)
        self.source = source
        self.identity = identity


class PeerThread:
    def __init__(
        self,
        host: HostTier,
        keys: "Keys | None" = None,
        transports: Sequence[str] = (SHARED_MEMORY, INLINE),
        engine: "TransferEngine | None" = None,
        clock: Callable[[], float] = time.monotonic,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Start the thread. `transports`: in order of preference. `engine`: Mooncake's transfer engine."""
        self.num_heard = 0  # messages received from peers
        self.num_lost = 0  # reads that ended early
        self.num_corrupt = 0  # blocks that arrived complete but did not match their checksums
        self._host = host
        self._keys = keys
        self._transports = tuple(transports)
        self._engine = engine
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._started: queue.SimpleQueue[PeerRead] = queue.SimpleQueue()
        self._numbers = count()
        self.peers: dict[str, _Peer] = {}  # peers by address
        self._lost_at: dict[tuple[str, str], float] = {}  # (address, transport) -> time at which blocks were last lost
        self._context = zmq.Context()
        self._wake, self._woken = os.pipe()[::-1]
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-peers", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        return sum(len(peer.reads) for peer in list(self.peers.values()))

    def read(self, source: BlockSource, identity: CacheIdentity, hashes: Sequence[bytes], block_bytes: int) -> PeerRead:
        read = PeerRead(self._host, hashes, block_bytes, source, identity)
        self._started.put(read)
        os.write(self._wake, b"\0")
        return read

    def close(self) -> None:
        self._closing = True
        os.write(self._wake, b"\0")
        self._thread.join()
        for peer in list(self.peers.values()):
            self._drop(peer, "this host ends")
        os.close(self._wake)
        os.close(self._woken)
        self._context.term()

    def _run(self) -> None:
        while not self._closing:
            poller = zmq.Poller()
            poller.register(self._woken, zmq.POLLIN)
            for peer in self.peers.values():
                poller.register(peer.socket, zmq.POLLIN)
                poller.register(peer.monitor, zmq.POLLIN)
            waits_ms = round(1000 * self._heartbeat_s) if self.num_open else 1000 if self.peers else None
            found = dict(poller.poll(waits_ms))
            try:
                if self._woken in found:
                    os.read(self._woken, 4096)
                while not self._started.empty():
                    self._begin(self._started.get())
                for peer in list(self.peers.values()):
                    self._serve(peer, found)
            except Exception:  # keep the thread alive: without it every waiting sequence would wait for its deadline
                log.exception("reading blocks of other hosts failed")
                for peer in list(self.peers.values()):
                    self._drop(peer, "reading failed")

    def _begin(self, read: PeerRead) -> None:
        address = read.source.address
        peer = self.peers.get(address)
        if peer is None:
            try:
                peer = self.peers[address] = _Peer(self._context, address, self._keys, self._clock)
            except zmq.ZMQError as error:
                log.warning("blocks cannot be read from %s: %s", address, error)
                self._end_read(read)
                return
            peer.send(PeerHello(PEER_VERSION, self._ways_to(read.source)))
        if not peer.reads:
            peer.heard_at = self._clock()
        number = next(self._numbers)
        peer.reads[number] = read
        if peer.transport is not None:
            peer.ask(number)

    def _ways_to(self, source: BlockSource) -> tuple[str, ...]:
        """Return the transports to offer: those that lost no blocks recently, or all if none is left."""
        oldest = self._clock() - _AVOIDED_S
        sound = [kind for kind in self._transports if self._lost_at.get((source.address, kind), -math.inf) < oldest]
        return tuple(sound) or self._transports

    def _serve(self, peer: "_Peer", found: "dict[object, int]") -> None:
        """Handle a peer's messages, and check whether it is still alive and needed."""
        try:
            while peer.socket in found and peer.socket.poll(0):
                frame, *payload = peer.socket.recv_multipart()
                peer.heard_at = self._clock()
                self.num_heard += 1
                self._hear(peer, decode_from_server(frame), payload)
            if peer.monitor in found:  # checked after the peer's last messages are handled
                raise PeerError("it has disconnected, or does not accept this host's keys")
            now = self._clock()
            if peer.reads and now - peer.heard_at > SILENCE_S:
                raise PeerError(f"it sent nothing for {SILENCE_S:g} s")
        except PeerError as error:
            self._drop(peer, str(error))
            return
        for number in [number for number, read in peer.reads.items() if read.is_cancelled]:
            peer.send(StopReading(number))
            self._end_read(peer.reads.pop(number))
        if not peer.reads and now - peer.heard_at > _IDLE_S:
            self._drop(peer, "")
        elif peer.reads and now - peer.said_at >= self._heartbeat_s:
            peer.send(StillThere())

    def _hear(self, peer: "_Peer", message: FromServer, payload: list[bytes]) -> None:
        match message:
            case PeerReady(version, kind, address):
                self._greet(peer, version, kind, address)
            case PeerRefused(reason):
                raise PeerError(reason)
            case BlocksReady(number, blocks):
                read = peer.reads.get(number)
                if read is not None and not self._copy(peer, number, read, blocks, payload):
                    peer.send(StopReading(number))
                    self._end_read(peer.reads.pop(number))
            case NoMoreBlocks(number, reason):
                if number in peer.reads:
                    log.warning("%s hands over no more of a sequence: %s", peer.address, reason)
                    self._end_read(peer.reads.pop(number))
            case StillThere():
                pass

    def _greet(self, peer: "_Peer", version: int, kind: str, address: str) -> None:
        if version != PEER_VERSION or kind not in self._transports:
            raise PeerError(f"it speaks version {version} of the blocks' protocol, and offers {kind}")
        try:
            peer.transport, peer.kind = open_transport(kind, address, self._engine), kind
        except PeerError:
            others = self._transports[self._transports.index(kind) + 1 :]
            if not others:
                raise
            peer.send(PeerHello(PEER_VERSION, others))
            return
        for number in peer.reads:
            peer.ask(number)

    def _copy(
        self, peer: "_Peer", number: int, read: PeerRead, blocks: Sequence[ReadyBlock], payload: list[bytes]
    ) -> bool:
        """Copy announced blocks and confirm them; return False if the read cannot continue."""
        names = read.hashes[len(read.slots) : len(read.slots) + len(blocks)]
        if len(names) < len(blocks) or (payload and len(payload) != len(blocks)) or peer.transport is None:
            log.warning("%s announced blocks that were not requested", peer.address)
            return False
        frames: list[bytes | None] = [*payload] or [None] * len(blocks)
        ready = {
            name: (RemoteBlock(name, block.place, frame), block.checksum)
            for name, block, frame in zip(names, blocks, frames, strict=True)
        }
        if read.is_cancelled or not read.add_next(names, partial(self._fill, peer, ready)):
            return False
        if len(read.slots) == len(read.hashes):
            peer.send(BlocksCopied(number, len(read.slots)))
            self._end_read(peer.reads.pop(number))
            return True
        peer.send(BlocksCopied(number, len(read.slots)))
        return True

    def _fill(
        self,
        peer: "_Peer",
        ready: "dict[bytes, tuple[RemoteBlock, int]]",
        slots: Sequence[HostSlot],
        checksums: dict[bytes, int],
    ) -> None:
        """Fill slots with ready blocks, up to the first with a wrong checksum. Raises TransportLostError."""
        assert peer.transport is not None
        is_whole = False
        try:
            peer.transport.read([ready[slot.block_hash][0] for slot in slots], slots)
            is_whole = True
        except TransportLostError:
            self._lost_at[peer.address, peer.kind] = self._clock()
            raise
        except PeerError as error:
            log.warning("%s: %s", peer.address, error)
        finally:  # even after an error, because the checksums show which blocks were copied
            for slot in slots:
                _, checksum = ready[slot.block_hash]
                if crc32(slot.memory) != checksum:
                    if is_whole:
                        self.num_corrupt += 1
                        log.warning("a block of %s does not agree with its checksum; it is recomputed", peer.address)
                    break
                checksums[slot.block_hash] = checksum

    def _end_read(self, read: PeerRead) -> None:
        if len(read.slots) < len(read.hashes) and not read.is_cancelled:
            self.num_lost += 1
        read.finish()

    def _drop(self, peer: "_Peer", why: str) -> None:
        """Close a peer's socket, and end its reads."""
        if why and peer.reads:
            log.warning("no more blocks come from %s: %s", peer.address, why)
        for read in peer.reads.values():
            self._end_read(read)
        peer.close()
        del self.peers[peer.address]


class _Peer:
    """A host from which blocks are read, and its open reads."""

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, keys: "Keys | None", clock: Callable[[], float]
    ) -> None:
        self.address = address
        self.reads: dict[int, PeerRead] = {}
        self.transport: Transport | None = None  # None until the peer has answered the greeting
        self.kind = ""  # kind of the transport
        self._clock = clock
        self.heard_at = self.said_at = clock()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            self.socket.curve_secretkey, self.socket.curve_publickey = keys.secret, keys.public
            self.socket.curve_serverkey = keys.peer
        failed = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self.monitor = self.socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED | failed | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
        )
        try:
            self.socket.connect(address)
        except zmq.ZMQError:
            self.close()  # the context could not terminate while a socket is open
            raise

    def send(self, message: FromReader) -> None:
        self.said_at = self._clock()
        self.socket.send(encode(message))

    def ask(self, number: int) -> None:
        """Request all blocks of a read."""
        read = self.reads[number]
        names = tuple(read.hashes)
        self.send(ReadBlocks(number, read.source.hand_over, read.identity, read.block_bytes, names))

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()

"""Serves blocks of a host tier to other engine hosts, by name, including blocks not computed yet.

An announced block stays unchanged until the reader has copied it, or has been silent for `LEASE_S`. A sequence that computes for a reader is *open*
from its submission to its end. If blocks are still missing shortly after that, they never come, and the reader gets a message. The server runs in a
separate thread. This module is independent of how a reader copies, and of what a block contains.
"""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import zmq

from pilotlight.engine.core.rates import TransferRate
from pilotlight.engine.host.socket_transport import guard_socket
from pilotlight.engine.kv.peers.messages import (
    HEARTBEAT_S,
    LEASE_S,
    PEER_VERSION,
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
    decode_from_reader,
    encode,
)
from pilotlight.engine.kv.peers.transports import INLINE, MOONCAKE, SHARED_MEMORY, Offer
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.tiers.host_slot import HostSlot
from pilotlight.engine.kv.tiers.host_tier import HostTier

if TYPE_CHECKING:
    from pilotlight.engine.api.keys import Keys
    from pilotlight.engine.kv.peers.mooncake import TransferEngine

log = logging.getLogger(__name__)

_LOOK_S = 0.003  # interval of checks for newly computed blocks
_BATCH_BYTES = 4 << 20  # most bytes per announcement
_WINDOW_BYTES = 32 << 20  # most bytes announced to one reader and not copied yet
# The limits of a batch and of the window for blocks sent inline. With a round trip of 50 ms the window moves 160 MB/s.
_SENT_BATCH_BYTES, _SENT_WINDOW_BYTES = 1 << 20, 8 << 20
# Limits for blocks sent inline, in seconds at the measured rate: a batch must take less than SILENCE_S, the reader's timeout.
_SENT_BATCH_S, _SENT_WINDOW_S = 0.5, 2.0
_FIRST_SENT_BYTES = 128 << 10  # most bytes per inline batch until a rate is measured: half a second at 2 Mbit/s
_LATE_S = 1.0  # most time from a read to the start of its sequence, and from the sequence's end to the store of its last block
_REMEMBERED = 1024  # most ended sequences to remember
_FORGOTTEN_S = 300.0  # silence after which a reader has certainly closed its socket


class BlockServer:
    def __init__(
        self,
        address: str,
        host: HostTier,
        keys: "Keys | None" = None,
        engine: "TransferEngine | None" = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the server's socket and start its thread.

        `keys`: only readers with the same keys are accepted. `engine`: offers Mooncake as an additional transport. Raises zmq.ZMQError if the address
        is not available.
        """
        self.rate = TransferRate()  # measured over all readers
        self.num_expired = 0  # reads that ended because their reader fell silent
        self._host = host
        self._clock = clock
        self._lock = threading.Lock()
        self.caches: set[CacheIdentity] = set()  # the models whose blocks are served
        self._hand_overs: dict[str, float | None] = {}  # sequence -> time of its end, None while open; the oldest first
        self.grants: dict[tuple[bytes, int], _Grant] = {}
        offers = [Offer(SHARED_MEMORY, str(host.directory)), Offer(INLINE)]
        if engine is not None:
            offers.append(Offer(MOONCAKE, engine.session, engine))
        self._offers = {offer.kind: offer for offer in offers}
        self._readers: dict[bytes, _KnownReader] = {}  # readers that have greeted
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._guard = None if keys is None else guard_socket(self._context, self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._close_socket()
            raise
        self._wake, self._woken = os.pipe()[::-1]
        self._thread = threading.Thread(target=self._run, name="kv-server", daemon=True)
        self._thread.start()

    @property
    def num_leased(self) -> int:
        """The number of announced blocks that readers have not copied yet."""
        return sum(len(grant.leased) for grant in list(self.grants.values()))

    def add_cache(self, identity: CacheIdentity) -> None:
        """Accept reads from caches with this identity."""
        with self._lock:
            self.caches.add(identity)

    def remove_cache(self, identity: CacheIdentity) -> None:
        with self._lock:
            self.caches.discard(identity)

    def begin(self, hand_over: str) -> None:
        """Record that a sequence will compute blocks for a reader."""
        with self._lock:
            self._hand_overs[hand_over] = None
            for ended in [name for name, at in self._hand_overs.items() if at is not None][:-_REMEMBERED]:
                del self._hand_overs[ended]

    def end(self, hand_over: str) -> None:
        """Record that the sequence computes no more blocks."""
        with self._lock:
            if hand_over in self._hand_overs:
                self._hand_overs[hand_over] = self._clock()

    def close(self) -> None:
        os.close(self._wake)
        self._thread.join()
        os.close(self._woken)
        for grant in self.grants.values():
            grant.release(self._host, len(grant.leased))
        self.grants.clear()
        self._close_socket()

    def _close_socket(self) -> None:
        self._socket.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while True:
            waits_ms = round(1000 * _LOOK_S) if self.grants else None
            found = dict(poller.poll(waits_ms))
            if self._woken in found:
                return
            try:
                while self._socket in found and self._socket.poll(0):
                    reader, frame = self._socket.recv_multipart()[:2]
                    self._hear(reader, frame)
                for grant in list(self.grants.values()):
                    self._advance(grant)
            except Exception:  # keep the thread alive: without it every reader would wait for its timeout
                log.exception("serving blocks to other hosts failed")

    def _hear(self, reader: bytes, frame: bytes) -> None:
        try:
            message = decode_from_reader(frame)
        except PeerError as error:
            self._send(reader, PeerRefused(str(error)))
            return
        now = self._clock()
        if reader in self._readers:
            self._readers[reader].heard_at = now
        for grant in self.grants.values():
            if grant.reader == reader:
                grant.heard_at = now
        self._obey(reader, message)

    def _obey(self, reader: bytes, message: FromReader) -> None:
        match message:
            case PeerHello():
                self._greet(reader, message)
            case ReadBlocks():
                self._begin_read(reader, message)
            case BlocksCopied(read, num_blocks):
                if grant := self.grants.get((reader, read)):
                    self._note_copied(grant, num_blocks)
            case StopReading(read):
                self._end(reader, read)
            case StillThere():
                pass

    def _greet(self, reader: bytes, hello: PeerHello) -> None:
        if hello.version != PEER_VERSION:
            reason = f"the reader speaks version {hello.version} of the blocks' protocol and this host {PEER_VERSION}: run the same release on both"
            self._send(reader, PeerRefused(reason))
            return
        kind = next((kind for kind in hello.transports if kind in self._offers), None)
        if kind is None:
            self._send(reader, PeerRefused(f"this host's blocks cannot be read by {', '.join(hello.transports)}"))
            return
        offer, now = self._offers[kind], self._clock()
        for gone in [name for name, known in self._readers.items() if now - known.heard_at > _FORGOTTEN_S]:
            del self._readers[gone]
        self._readers[reader] = _KnownReader(offer, now)
        self._send(reader, PeerReady(PEER_VERSION, kind, offer.address))

    def _begin_read(self, reader: bytes, message: ReadBlocks) -> None:
        with self._lock:
            caches = set(self.caches)
        if reader not in self._readers:
            self._send(reader, PeerRefused("this reader has not greeted the host"))
        elif message.identity not in caches:
            self._send(reader, NoMoreBlocks(message.read, _difference(message.identity, caches)))
        elif message.block_bytes < 1:
            self._send(reader, NoMoreBlocks(message.read, f"blocks do not have {message.block_bytes} bytes"))
        elif (reader, message.read) in self.grants:
            self._send(reader, NoMoreBlocks(message.read, "a read with this number is already open"))
        else:
            self.grants[reader, message.read] = _Grant(reader, message, self._clock())

    def _note_copied(self, grant: "_Grant", num_blocks: int) -> None:
        while grant.batches and grant.batches[0].end <= num_blocks:
            batch, now, reader = grant.batches.popleft(), self._clock(), self._readers[grant.reader]
            # Batches are copied one after another: do not count the time in which the reader copied previous batches.
            self.rate.add(batch.num_blocks * grant.block_bytes, now - max(batch.sent_at, reader.copied_at))
            reader.copied_at = now
            grant.release(self._host, batch.num_blocks)
        if grant.is_complete:
            self._end(grant.reader, grant.read)

    def _advance(self, grant: "_Grant") -> None:
        """Announce newly available blocks to the reader, or send a heartbeat or the end of the read."""
        now = self._clock()
        if now - grant.heard_at > LEASE_S:
            self.num_expired += 1
            self._end(grant.reader, grant.read)
            return
        if slots := self._pin_next(grant):
            grant.leased += slots
            grant.batches.append(_Batch(len(slots), grant.num_announced, now))
            grant.moved_at = now
            self._send_blocks(grant, slots)
        elif not grant.is_announced and self._has_ended(grant, now):
            self._send(grant.reader, NoMoreBlocks(grant.read, "the host computes no more blocks of the sequence"))
            self._end(grant.reader, grant.read)
        elif now - self._readers[grant.reader].told_at >= HEARTBEAT_S:
            self._send(grant.reader, StillThere())

    def _pin_next(self, grant: "_Grant") -> list[HostSlot]:
        slots: list[HostSlot] = []
        at_once, window = self._readers[grant.reader].most_bytes(self.rate.bytes_per_s)
        left = window - len(grant.leased) * grant.block_bytes
        if left <= 0:
            return []
        most = max(1, min(at_once, left) // grant.block_bytes)
        while grant.names and len(slots) < most:
            slot = self._host.pin(grant.names[0], is_hit=True)
            if slot is None:
                break
            if slot.file.slot_bytes != grant.block_bytes or not self._host.is_sound(slot):
                self._host.unpin([slot])
                break
            grant.names.popleft()
            grant.num_announced += 1
            slots.append(slot)
        return slots

    def _has_ended(self, grant: "_Grant", now: float) -> bool:
        """True if missing blocks never come: `_LATE_S` ago their sequence ended, or should have started."""
        with self._lock:
            ended_at = self._hand_overs.get(grant.hand_over, grant.began_at)
        return ended_at is not None and now - max(ended_at, grant.moved_at) > _LATE_S

    def _send_blocks(self, grant: "_Grant", slots: list[HostSlot]) -> None:
        reader = self._readers[grant.reader]
        offer, ready = reader.offer, [ReadyBlock(reader.offer.place_of(slot), slot.checksum) for slot in slots]
        message = BlocksReady(grant.read, tuple(ready))
        self._send(grant.reader, message, [frame for slot in slots for frame in offer.frame_of(slot)])

    def _send(self, reader: bytes, message: FromServer, frames: "list[bytes] | tuple[()]" = ()) -> None:
        if reader in self._readers:
            self._readers[reader].told_at = self._clock()
        self._socket.send_multipart([reader, encode(message), *frames], copy=False)

    def _end(self, reader: bytes, read: int) -> None:
        grant = self.grants.pop((reader, read), None)
        if grant is not None:
            grant.release(self._host, len(grant.leased))


class _KnownReader:
    """A reader that has greeted, and its transport."""

    def __init__(self, offer: Offer, now: float) -> None:
        self.offer = offer
        self.heard_at = self.told_at = now
        self.copied_at = 0.0

    def most_bytes(self, bytes_per_s: float) -> tuple[int, int]:
        """Return the most bytes per announcement, and the most bytes announced but not copied yet.

        `bytes_per_s`: the measured rate; 0 if unknown.
        """
        if self.offer.kind != INLINE:
            return _BATCH_BYTES, _WINDOW_BYTES
        rate = bytes_per_s or _FIRST_SENT_BYTES / _SENT_BATCH_S
        return min(_SENT_BATCH_BYTES, int(_SENT_BATCH_S * rate)), min(_SENT_WINDOW_BYTES, int(_SENT_WINDOW_S * rate))


class _Batch(NamedTuple):
    num_blocks: int
    end: int  # number of the read's blocks in this and all previous batches
    sent_at: float


class _Grant:
    """A read of one reader: the names not announced yet, and the pinned blocks not copied yet."""

    def __init__(self, reader: bytes, message: ReadBlocks, now: float) -> None:
        self.reader = reader
        self.read = message.read
        self.hand_over = message.hand_over
        self.block_bytes = message.block_bytes
        self.names = deque(message.names)  # names of blocks not announced yet
        self.num_announced = 0
        self.leased: deque[HostSlot] = deque()
        self.batches: deque[_Batch] = deque()
        self.began_at = self.heard_at = self.moved_at = now

    @property
    def is_announced(self) -> bool:
        return not self.names

    @property
    def is_complete(self) -> bool:
        return not self.names and not self.leased

    def release(self, host: HostTier, num_blocks: int) -> None:
        host.unpin([self.leased.popleft() for _ in range(num_blocks)])


def _difference(wanted: CacheIdentity, caches: "set[CacheIdentity]") -> str:
    """Return a sentence that explains why none of this host's caches matches the reader's."""
    same = next((cache for cache in caches if cache.model == wanted.model), None)
    if same is None:
        return f"this host does not have {wanted.model!r}"
    facts = [name for name in wanted._fields if getattr(wanted, name) != getattr(same, name)]
    return f"this host's {wanted.model!r} differs from the reader's in {', '.join(facts)}"

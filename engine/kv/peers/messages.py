"""What two engine hosts say about blocks that one computes and the other fetches: every message, and its byte form.

A reader greets (`PeerHello`, answered by `PeerReady` or `PeerRefused`), then asks for blocks by name (`ReadBlocks`). The server says of each
batch where it lies, as soon as it is complete (`BlocksReady`, with the bytes behind it where both share no memory), and keeps it there until the
reader says that it has copied it (`BlocksCopied`), or is silent for a lease. Refuses to know sockets and threads.
"""

from typing import NamedTuple

import msgspec

from pilotlight.engine.kv.pool.prefix_index import CacheIdentity

PEER_VERSION = 1  # of these messages; peers of two versions refuse each other
LEASE_S = 5.0  # of silence, after which a reader's blocks may be overwritten
HEARTBEAT_S = 0.25  # of a server that computes what a reader waits for, and of a reader that waits
SILENCE_S = 2.0  # of a server, after which a reader computes by itself


class PeerError(Exception):
    """What a peer says cannot be used; the message says why."""


class TransportLostError(PeerError):
    """A way to a peer's blocks leads there no more; another one may."""


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    version: int
    transports: tuple[str, ...]  # that the reader could use, the best first
    borrows: bool = False  # it is another site's: how fast it copies says nothing about this site's hosts


class PeerReady(msgspec.Struct, frozen=True, tag=True):
    version: int
    transport: str
    address: str = ""  # by which the transport finds the server's memory


class PeerRefused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Ask for blocks, which may still have to be computed."""

    read: int  # chosen by the reader; no two of its open ones are equal
    hand_over: str  # the sequence that computes them
    identity: CacheIdentity
    block_bytes: int
    names: tuple[bytes, ...]


class ReadyBlock(NamedTuple):
    """A block at the server, in the order asked for."""

    place: int  # as the transport understands it
    checksum: int


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """The next blocks of a read. Where the transport is "inline", as many frames follow with their bytes."""

    read: int
    blocks: tuple[ReadyBlock, ...]
    # at which this reader has copied what came before, in this read and others; 0: not measured yet
    bytes_per_s: float = 0.0


class BlocksCopied(msgspec.Struct, frozen=True, tag=True):
    read: int
    num_blocks: int  # from the first on


class StopReading(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for the rest."""

    read: int


class StillThere(msgspec.Struct, frozen=True, tag=True):
    """Of a server: what is asked for is being computed. Of a reader: it still waits."""


class NoMoreBlocks(msgspec.Struct, frozen=True, tag=True):
    """The rest of a read never comes."""

    read: int
    reason: str


FromReader = PeerHello | ReadBlocks | BlocksCopied | StopReading | StillThere
FromServer = PeerReady | PeerRefused | BlocksReady | StillThere | NoMoreBlocks

_encoder = msgspec.msgpack.Encoder()
_from_reader: msgspec.msgpack.Decoder[FromReader] = msgspec.msgpack.Decoder(FromReader)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: FromReader | FromServer) -> bytes:
    return _encoder.encode(message)


def decode_from_reader(frame: bytes) -> FromReader:
    """Raises PeerError."""
    try:
        return _from_reader.decode(frame)
    except msgspec.DecodeError as error:
        raise PeerError(f"a frame of {len(frame)} bytes is no message of a reader of blocks: {error}") from None


def decode_from_server(frame: bytes) -> FromServer:
    """Raises PeerError."""
    try:
        return _from_server.decode(frame)
    except msgspec.DecodeError as error:
        raise PeerError(f"a frame of {len(frame)} bytes is no message of a server of blocks: {error}") from None

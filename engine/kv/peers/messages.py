"""The messages between two engine hosts about blocks that one of them computes and the other fetches.

A reader greets (`PeerHello`, answered by `PeerReady` or `PeerRefused`), then requests blocks by name (`ReadBlocks`). The server announces each
complete batch (`BlocksReady`, followed by the bytes if they share no memory), and keeps it until the reader confirms its copy (`BlocksCopied`), or is
silent for `LEASE_S`. This module is independent of sockets and threads.
"""

from typing import NamedTuple

import msgspec

from pilotlight.engine.kv.pool.prefix_index import CacheIdentity

PEER_VERSION = 1  # version of these messages; peers of different versions refuse each other
LEASE_S = 5.0  # silence of a reader after which the blocks kept for it may be overwritten
HEARTBEAT_S = 0.25  # interval of heartbeats of a server that computes for a reader, and of a waiting reader
SILENCE_S = 2.0  # silence of a server after which its reader computes the blocks itself


class PeerError(Exception):
    """A peer or one of its messages cannot be used; the text gives the reason."""


class TransportLostError(PeerError):
    """A transport to a peer's blocks no longer works; another transport may work."""


class PeerHello(msgspec.Struct, frozen=True, tag=True):
    version: int
    transports: tuple[str, ...]  # transports that the reader supports, in order of preference


class PeerReady(msgspec.Struct, frozen=True, tag=True):
    version: int
    transport: str
    address: str = ""  # address at which the transport finds the server's memory


class PeerRefused(msgspec.Struct, frozen=True, tag=True):
    reason: str


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """A request for blocks, which the server may still have to compute."""

    read: int  # number chosen by the reader; unique among its open reads
    hand_over: str  # the sequence that computes the blocks
    identity: CacheIdentity
    block_bytes: int
    names: tuple[bytes, ...]


class ReadyBlock(NamedTuple):
    """A block at the server that the reader can copy."""

    place: int  # number by which the transport finds the block
    checksum: int


class BlocksReady(msgspec.Struct, frozen=True, tag=True):
    """The next blocks of a read, in its order; the transport "inline" adds a frame of bytes per block."""

    read: int
    blocks: tuple[ReadyBlock, ...]


class BlocksCopied(msgspec.Struct, frozen=True, tag=True):
    read: int
    num_blocks: int  # number of copied blocks, counted from the first of the read


class StopReading(msgspec.Struct, frozen=True, tag=True):
    """The reader no longer needs the rest of a read."""

    read: int


class StillThere(msgspec.Struct, frozen=True, tag=True):
    """A heartbeat: the server is still computing, or the reader is still waiting."""


class NoMoreBlocks(msgspec.Struct, frozen=True, tag=True):
    """The end of a read whose remaining blocks never come."""

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
    """Decode a reader's message. Raises PeerError."""
    try:
        return _from_reader.decode(frame)
    except msgspec.DecodeError as error:
        raise PeerError(f"a frame of {len(frame)} bytes is not a message of a reader of blocks: {error}") from None


def decode_from_server(frame: bytes) -> FromServer:
    """Decode a server's message. Raises PeerError."""
    try:
        return _from_server.decode(frame)
    except msgspec.DecodeError as error:
        raise PeerError(f"a frame of {len(frame)} bytes is not a message of a server of blocks: {error}") from None

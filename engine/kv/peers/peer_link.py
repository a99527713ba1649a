"""An engine host's links to other hosts: a server and a reader of blocks.

They are opened after the host tier and closed before it.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import zmq

from pilotlight.engine.api.keys import KeysError, read_keys
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.kv.peers.block_server import BlockServer
from pilotlight.engine.kv.peers.messages import PeerError
from pilotlight.engine.kv.peers.mooncake import TransferEngine
from pilotlight.engine.kv.peers.peer_thread import PeerThread
from pilotlight.engine.kv.peers.transports import INLINE, MOONCAKE, SHARED_MEMORY
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.tiers.host_tier import HostTier

log = logging.getLogger(__name__)


class PeerLink(NamedTuple):
    """The server and the reader of blocks, for one model."""

    server: BlockServer
    reader: PeerThread
    identity: CacheIdentity

    def close(self) -> None:
        self.server.remove_cache(self.identity)


class HostPeers(NamedTuple):
    server: BlockServer
    reader: PeerThread

    def link(self, identity: CacheIdentity) -> PeerLink:
        self.server.add_cache(identity)
        return PeerLink(self.server, self.reader, identity)

    def close(self) -> None:
        self.server.close()
        self.reader.close()


def open_peers(config: HostConfig, host: HostTier) -> HostPeers | None:
    """Open server and reader; on failure log it and return None: blocks are then not exchanged."""
    assert config.peer_address is not None
    transports: tuple[str, ...] = (SHARED_MEMORY, INLINE)
    try:
        engine = None
        if config.peer_transport == "mooncake":
            engine, transports = TransferEngine(own_host(config.peer_address)), (MOONCAKE, INLINE)
        keys = None if config.peer_keys is None else read_keys(Path(config.peer_keys))
        server = BlockServer(config.peer_address, host, keys, engine)
        return HostPeers(server, PeerThread(host, keys, transports, engine))
    except (KeysError, PeerError, zmq.ZMQError) as error:
        log.warning("%s serves no blocks to other hosts: %s", config.peer_address, error)
        return None


def own_host(address: str) -> str:
    """Return the address under which peers reach this machine; loopback if `address` is a socket file."""
    return address.removeprefix("tcp://").rpartition(":")[0] if address.startswith("tcp://") else "127.0.0.1"

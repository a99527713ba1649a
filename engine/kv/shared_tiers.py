"""The tiers of one engine host, shared by its models.

Their content outlives the host. A tier that is not available is logged once and omitted, because it is only a cache. This module reads the
configuration; it is independent of blocks.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.device.device import choose_device
from pilotlight.engine.device.registered_memory import RegisteredMemory
from pilotlight.engine.device.slot_memory import SlotMemory
from pilotlight.engine.kv.pool.prefix_index import CacheIdentity
from pilotlight.engine.kv.store.store_thread import StoreThread
from pilotlight.engine.kv.store.store_tier import StoreTier
from pilotlight.engine.kv.tier_protocol import TierError, Tiers
from pilotlight.engine.kv.tiered_cache import TieredCache
from pilotlight.engine.kv.tiers.disk_thread import DiskThread
from pilotlight.engine.kv.tiers.disk_tier import DiskTier
from pilotlight.engine.kv.tiers.host_tier import HostTier
from pilotlight.engine.kv.transfer.block_copier import BlockCopier

if TYPE_CHECKING:
    from pilotlight.engine.kv.peers.peer_link import HostPeers

log = logging.getLogger(__name__)

# How long a new host waits for the directories of an old one: after a site is killed, its old engine host lives until the next heartbeat.
_PATIENCE_S = 1.0


class SharedTiers:
    def __init__(
        self,
        host: HostTier,
        disk: DiskThread | None,
        peers: "HostPeers | None" = None,
        store: StoreThread | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self.peers = peers
        self.store = store

    def memory_for(self, block_bytes: int) -> RegisteredMemory | None:
        """Return the host tier's memory for blocks of this size.

        None if they do not fit; `cache_for` logs that case.
        """
        try:
            return self.host.add_size(block_bytes)
        except TierError:
            return None

    def cache_for(self, identity: CacheIdentity, copier: BlockCopier, block_bytes: int) -> Tiers:
        """Return one model's view of the tiers; `block_bytes` includes all ranks' parts of a block."""
        link = self.peers.link(identity) if self.peers is not None else None
        try:
            return TieredCache(self.host, self.disk, copier, block_bytes, peers=link, store=self.store)
        except TierError as error:
            log.warning("%s runs without KV tiers: %s", identity.model, error)
            return Tiers()

    def close(self) -> None:
        """Close the tiers. The models' views of them must be closed already."""
        if self.peers is not None:
            self.peers.close()
        if self.store is not None:  # closed before the disk, because the store's thread also reads the disk
            self.store.close()
        if self.disk is not None:
            self.disk.close()
        self.host.close()


def open_tiers(
    config: HostConfig,
    patience_s: float = _PATIENCE_S,
    join_store: Callable[[str], StoreTier] = StoreTier.join,
) -> SharedTiers | None:
    """Open the configured tiers. `patience_s`: how long to wait for directories that another host holds."""
    if not config.kv_host_bytes or config.kv_host_dir is None:
        return None
    try:
        # With several ranks the host joins their parts of a block, so no device accesses the slots.
        device = choose_device(config.device if len(config.group) < 2 else "cpu")
        directory = Path(config.kv_host_dir)
        host = HostTier.open(directory, config.kv_host_bytes, patience_s=patience_s, memory=SlotMemory(device))
    except TierError as error:
        log.warning("%s; this engine host runs without KV tiers", error)
        return None
    disk = None
    if config.kv_disk_dir is not None and config.kv_disk_bytes:
        try:
            opened = DiskTier.open(Path(config.kv_disk_dir), config.kv_disk_bytes, patience_s)
            disk = DiskThread(opened, host, write_bytes_per_s=config.kv_disk_write_bytes_per_s or math.inf)
        except TierError as error:
            log.warning("%s; this engine host runs without a disk KV tier", error)
    store = None
    if config.kv_store is not None:
        store = StoreThread(config.kv_store, host, None if disk is None else disk.disk, join=join_store)
    return SharedTiers(host, disk, _peers(config, host), store)


def _peers(config: HostConfig, host: HostTier) -> "HostPeers | None":
    if config.peer_address is None:
        return None
    # Imported here because a host without peers needs no sockets.
    from pilotlight.engine.kv.peers.peer_link import open_peers

    return open_peers(config, host)

"""Transfers of sequences' blocks between the device and the tiers, while other sequences run.

A fetch from the host tier fills device blocks that its sequence already holds. A read from the disk or the store fills the host tier: its sequence
holds no blocks and waits for admission, as does a sequence whose blocks are in transfer for another one. This module is independent of the bytes of
blocks and of running sequences.
"""

from collections.abc import Callable

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.manager import BlockManager
from pilotlight.engine.kv.pool.cached_prefix import CachedPrefix
from pilotlight.engine.kv.pool.groups import CacheGroups
from pilotlight.engine.kv.pool.prefix_index import block_name
from pilotlight.engine.kv.tier_protocol import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S, Tiers, Transfer
from pilotlight.engine.scheduling.awaited import Awaited
from pilotlight.engine.scheduling.scheduler_counts import SchedulerCounts


class KVConnector:
    def __init__(
        self,
        tiers: Tiers,
        blocks: BlockManager,
        groups: CacheGroups,
        counts: SchedulerCounts,
        clock: Callable[[], float],
    ) -> None:
        self.tiers = tiers
        self.blocks = blocks
        self.groups = groups
        self.counts = counts
        self._clock = clock
        self._loads: list[_Load] = []  # transfers; some may have ended
        # Waiting sequences: those in `_gave_up` have waited for another sequence's transfer that timed out, those in `_looked_up` have queried the
        # store.
        self._gave_up: set[Sequence] = set()
        self._looked_up: set[Sequence] = set()

    def may_wait(self, sequence: Sequence) -> bool:
        """False if the sequence has already waited for another sequence's transfer that timed out."""
        return sequence not in self._gave_up

    def defer(self, sequence: Sequence, prefix: CachedPrefix) -> Awaited | None:
        """Return a wait for a transfer of the prefix's missing blocks to the host tier, or None.

        It is another sequence's transfer, or a new read from disk or store; None if neither is needed. The sequence holds no blocks while
        it waits.
        """
        if not prefix.names:
            return None
        self._loads = [load for load in self._loads if not load.has_ended]
        for load in self._loads:
            if load.prefix.names[0] == prefix.names[0]:
                return _OthersLoad(sequence, load, self._gave_up)
        if not prefix.num_behind:
            return None
        return self._begin(_TierLoad(self, sequence, self.tiers.read(prefix.names), prefix, self._deadline()))

    def ask(self, sequence: Sequence, names: list[bytes]) -> Awaited | None:
        """Request blocks from the host that computes them; return the wait, or None if that is impossible."""
        source, sequence.source = sequence.source, None
        transfer = self.tiers.ask(source, names) if source is not None and names else None
        if source is None or transfer is None:
            return None
        prefix = CachedPrefix(len(sequence.block_hashes), [], [], 0, names=tuple(names))
        return self._begin(_PeerLoad(self, sequence, transfer, prefix, self._clock() + source.within_s))

    def look_up(self, sequence: Sequence, names: list[bytes]) -> Awaited | None:
        """Query the store for these blocks; return the wait for its answer, or None if it was not queried."""
        self._looked_up.add(sequence)
        transfer = self.tiers.look_up(names) if names else None
        nothing = CachedPrefix(0, [], [], 0)
        return (
            None if transfer is None else _Lookup(self, sequence, transfer, nothing, self._clock() + LOOKUP_TIMEOUT_S)
        )

    def may_look_up(self, sequence: Sequence) -> bool:
        return self.tiers.has_store and sequence not in self._looked_up

    def fetch(self, sequence: Sequence, prefix: CachedPrefix, blocks: list[int]) -> Awaited:
        """Start to fetch the missing part of a prefix from the host tier into `blocks`; return the wait."""
        transfer = self.tiers.fetch(prefix.names, blocks)
        return self._begin(_HostLoad(self, sequence, transfer, prefix, self._deadline()))

    def on_start(self, sequence: Sequence) -> None:
        """Record that the sequence runs now with the blocks found for it; unpin them in the tiers."""
        self._gave_up.discard(sequence)
        self._looked_up.discard(sequence)
        self.tiers.unpin(sequence)
        if sequence.hands_over:
            self._store_cached(sequence)
        self.tiers.touch(self._names(sequence, sequence.num_registered_blocks))

    def on_end(self, sequence: Sequence) -> None:
        """Record that the sequence has ended, or was aborted while it waited; unpin its blocks in the tiers."""
        self._gave_up.discard(sequence)
        self._looked_up.discard(sequence)
        self.tiers.unpin(sequence)
        self.tiers.end_chain(self._names(sequence, len(sequence.block_hashes)))
        if sequence.hands_over:
            self.tiers.end_hand_over(sequence.sequence_id)

    def _store_cached(self, sequence: Sequence) -> None:
        """Copy blocks that the sequence found on the device to the host tier, for other hosts to read.

        Skip a block if the prefix cache has another one under its name: the tiers are not notified before such a duplicate is overwritten.
        """
        for i, group in self.groups.seen(sequence.num_registered_blocks):
            block, name = sequence.tables[group].blocks[i], block_name(sequence.block_hashes[i], group)
            if self.blocks.is_cached(block, name):
                self.tiers.store(block, name)

    def _names(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """Return the names of the blocks that tokens after `num_blocks` blocks see, head of the chain first."""
        return [block_name(sequence.block_hashes[i], group) for i, group in self.groups.seen(num_blocks)]

    def _deadline(self) -> float:
        return self._clock() + TRANSFER_TIMEOUT_S

    def _begin(self, load: "_Load") -> "_Load":
        self._loads.append(load)
        return load


class _Load:
    """A wait of a sequence for a transfer of blocks of its chain."""

    is_admitted = False

    def __init__(
        self, connector: KVConnector, sequence: Sequence, transfer: Transfer, prefix: CachedPrefix, deadline: float
    ) -> None:
        self.sequence = sequence
        self.deadline = deadline
        self.prefix = prefix
        self.num_tokens = len(sequence.token_ids) - prefix.num_blocks * connector.groups.block_size
        self.has_ended = False
        self.is_late = False  # whether the transfer was cancelled at its deadline
        self._connector = connector
        self._transfer = transfer

    @property
    def is_done(self) -> bool:
        return self._transfer.is_done

    def cancel(self) -> None:
        self._connector.tiers.cancel(self._transfer)
        self.has_ended = True

    def take(self) -> None:
        self.is_late, self.has_ended = self.has_ended, True


class _TierLoad(_Load):
    """A transfer to the host tier, where the blocks stay pinned until the sequence runs."""

    def take(self) -> None:
        super().take()
        num_read = self._connector.tiers.take_read(self.sequence, self._transfer)
        if self.prefix.num_in_store:  # a few blocks of such a read may come from the disk, but all count as the store's
            self.sequence.num_store_blocks = num_read
        else:
            self.sequence.num_disk_blocks = num_read


class _PeerLoad(_Load):
    """A transfer of another host's blocks to the host tier, pinned there until the sequence runs."""

    def take(self) -> None:
        super().take()
        self.sequence.num_peer_blocks = self._connector.tiers.take_read(self.sequence, self._transfer)
        if self.sequence.num_peer_blocks < len(self.prefix.names):  # it computes the rest in turn with other prompts
            self.sequence.priority = self.sequence.own_priority


class _HostLoad(_Load):
    """A transfer from the host tier into device blocks that the sequence holds."""

    is_admitted = True

    def take(self) -> None:
        super().take()
        connector, sequence = self._connector, self.sequence
        connector.blocks.end_fetch(sequence, self.prefix, self._transfer.num_blocks)
        num_fetched = max(0, sequence.num_registered_blocks - self.prefix.num_cached)
        if sequence.num_cached_tokens is None:  # otherwise the hits were counted already, before a preemption
            asked = len(self.prefix.names)  # blocks of all groups
            num_from_peer = num_fetched * min(sequence.num_peer_blocks, asked) // asked
            rest = num_fetched - num_from_peer
            num_from_disk = rest * min(sequence.num_disk_blocks or 0, asked) // asked
            num_from_store = rest * min(sequence.num_store_blocks or 0, asked) // asked
            block_size = connector.groups.block_size
            sequence.num_fetched_tokens = num_from_peer * block_size
            connector.counts.prefix_peer_hits += num_from_peer * block_size
            connector.counts.prefix_disk_hits += num_from_disk * block_size
            connector.counts.prefix_store_hits += num_from_store * block_size
            connector.counts.prefix_host_hits += (rest - num_from_disk - num_from_store) * block_size


class _Lookup(_Load):
    """A query of the store for a sequence's chain; it transfers no blocks."""


class _OthersLoad:
    """A wait of a sequence for a transfer that another sequence has started."""

    is_admitted = False
    num_tokens = 1  # tokens to compute: nearly all tokens are cached after the transfer

    def __init__(self, sequence: Sequence, load: _Load, gave_up: set[Sequence]) -> None:
        self.sequence = sequence
        self.deadline = load.deadline
        self._load = load
        self._gave_up = gave_up

    @property
    def is_done(self) -> bool:
        return self._load.has_ended

    def cancel(self) -> None:
        pass

    def take(self) -> None:
        if self._load.is_late:  # do not wait again: otherwise one sequence after another would repeat the late read
            self._gave_up.add(self.sequence)

"""The interface of the tiers for the engine and its scheduler.

The interface is independent of bytes, threads and files (tiered_cache.py). Blocks are named by the hashes of prefix_index.py; `owner` identifies the
holder of a pin.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, Protocol

from pilotlight.engine.api.protocol import NONE_CORRUPT, BlockSource, CorruptBlocks

TRANSFER_TIMEOUT_S = 5.0  # how long a sequence waits for a transfer before it computes
LOOKUP_TIMEOUT_S = 1.0  # how long a sequence waits for the store's answer

Tier = Literal["host", "disk", "store"]


class TierError(Exception):
    """A tier cannot be used here; the message gives the reason and what to change."""


class TierLoad(NamedTuple):
    """The state of an engine's tiers."""

    num_lost: int = 0  # chains that a tier could not return unchanged (counter)
    num_pinned: int = 0  # blocks of the host tier, of all models, that are in use or reserved for waiting sequences
    handed_over_blocks_per_s: float = 0.0  # rate at which other hosts fetch this model's blocks; 0 if not measured yet
    store: str = ""  # the store's random name; empty without a store, or before it has answered
    store_blocks_per_s: float = 0.0  # rate at which blocks are read from the store; 0 if not measured yet
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class Transfer(Protocol):
    """A transfer of blocks by another thread."""

    @property
    def is_done(self) -> bool: ...
    @property
    def num_blocks(self) -> int:
        """The number of blocks that have arrived, counted from the first requested block."""


class Tiers:
    """The interface of one model's tiers. This class has no tiers; TieredCache overrides its methods."""

    has_store = False  # True if there is a store, which may have blocks that no other tier has

    # Operations on a sequence's blocks, for the scheduler

    def store(self, block: int, block_hash: bytes) -> None:
        """Queue a block whose content is complete for a copy to the host tier."""

    def drop(self, block: int) -> None:
        """Drop a queued copy of a block that will be overwritten, or wait for its running copy."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop bad blocks from all tiers, after `drop` was called for the blocks on the device."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Record that a chain was found, on the device or in a tier."""

    def end_chain(self, hashes: Sequence[bytes]) -> None:
        """Record that the sequence of a chain has ended, so that the chain's tail is evicted before its head."""

    def place_of(self, name: bytes) -> Tier | None:
        """Return the nearest tier that has the block now, or None."""
        return None

    def pays(self, names: Sequence[bytes], num_tokens: int) -> bool:
        """True if fetching these blocks is predicted to take less time than computing `num_tokens`."""
        return False

    def look_up(self, names: Sequence[bytes]) -> Transfer | None:
        """Query the store for these blocks, which `place_of` then finds; None if no store is usable."""
        return None

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        """Start to read blocks from the disk or the store to the host tier."""
        raise NotImplementedError("nothing was offered")

    def ask(self, source: BlockSource, names: Sequence[bytes]) -> Transfer | None:
        """Start to fetch blocks to the host tier from the host that computes them; None without peers."""
        return None

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        """Start to fetch blocks from the host tier into `blocks` of the device."""
        raise NotImplementedError("nothing was offered")

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer, finished or not: afterwards nothing is written to its blocks."""

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        """Pin a finished read's blocks for `owner`; return how many were not in the host tier before."""
        return 0

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int], num_tokens: int) -> bool:
        """Start to copy those blocks to the host tier that it does not have, and pin all there for `owner`.

        Returns False, and does nothing, if computing their tokens again is predicted to be cheaper.
        """
        return False

    def unpin(self, owner: Hashable) -> None:
        """Undo all pins of `owner`."""

    def end_hand_over(self, hand_over: str) -> None:
        """Record that a sequence computes no more for another host."""

    # Operations on the whole model, for the engine

    def begin_stores(self, everything: bool) -> None:
        """Start to copy queued blocks. Called after the results of a step were sent.

        The amount is bounded, except if `everything` is set or another host waits for blocks.
        """

    def begin_hand_over(self, hand_over: str) -> None:
        """Record that a sequence will compute blocks for another host."""

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Record the current speed of recomputation; 0 if unknown."""

    def reset(self) -> None:
        """End all copies from and to the device, because its content is unreliable."""

    def close(self) -> None:
        """Close this view of the tiers: afterwards nothing accesses the device's blocks."""

    @property
    def num_heard(self) -> int:
        """The number of messages from hosts that compute for this one, which shows their progress."""
        return 0

    def load(self) -> TierLoad:
        """Return the state of the tiers."""
        return TierLoad()

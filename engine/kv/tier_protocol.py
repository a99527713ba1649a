"""The interface of the tiers for the engine and its scheduler, and its form without tiers.

Knows which blocks go where and which come back; does not know bytes, threads and files (tiered_cache.py). Blocks are named by the hashes of
prefix_index.py; `owner` identifies the holder of a pin.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, Protocol

from pilotlight.engine.api.protocol import NONE_CORRUPT, BlockSource, CorruptBlocks

TRANSFER_TIMEOUT_S = 5.0  # how long a sequence waits for a transfer before it computes
LOOKUP_TIMEOUT_S = 1.0  # how long it waits for the store's answer

Tier = Literal["host", "disk", "store"]


class TierError(Exception):
    """A tier that cannot be used here; the message gives the reason and what to change."""


class TierLoad(NamedTuple):
    """The state of an engine's tiers."""

    num_lost: int = 0  # chains that a tier could not return unchanged (counter)
    num_pinned: int = 0  # blocks of the host tier, of all models, kept for readers and waiters
    handed_over_blocks_per_s: float = 0.0  # rate at which other hosts fetch this model's blocks; 0 if not measured yet
    store: str = ""  # the store's name among its members; empty without a store, or before it has answered
    store_blocks_per_s: float = 0.0  # rate at which blocks are read from it; 0 if not measured yet
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class Transfer(Protocol):
    """Blocks in transfer, moved by another thread."""

    @property
    def is_done(self) -> bool: ...
    @property
    def num_blocks(self) -> int:
        """Return the number of arrived blocks, counted from the first requested."""


class PeerTransfer(Transfer, Protocol):
    @property
    def bytes_per_s(self) -> float:
        """The rate of the other host's blocks, over all transfers, as measured by that host; 0: unknown."""


class Tiers:
    """The tiers of one model's device cache: none here. TieredCache has them, and overrides everything."""

    has_store = False  # a store may have blocks that no other tier has

    # Operations on a sequence's blocks, for the scheduler

    def store(self, block: int, block_hash: bytes) -> None:
        """Copy a block whose content is complete, when there is time."""

    def drop(self, block: int) -> None:
        """Let a block be overwritten: afterwards no copy reads it."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Drop bad content; its blocks were dropped before."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Record that a chain was found, on the device or in a tier."""

    def end_chain(self, hashes: Sequence[bytes]) -> None:
        """Record that a chain has ended: its tail is worth less than its head."""

    def place_of(self, name: bytes) -> Tier | None:
        """Return the nearest tier that has a block now."""
        return None

    def pays(self, names: Sequence[bytes], num_tokens: int) -> bool:
        """True if fetching these blocks is predicted to take less time than computing `num_tokens`."""
        return False

    def look_up(self, names: Sequence[bytes]) -> Transfer | None:
        """Start to ask the store which of these blocks it has; `place_of` then knows.

        None if no store answers.
        """
        return None

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        """Start to read from disk or store to the host tier."""
        raise NotImplementedError("nothing was offered")

    def ask(self, source: BlockSource, names: Sequence[bytes]) -> PeerTransfer | None:
        """Start to fetch blocks that another host computes into the host tier; None if this host fetches none."""
        return None

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        """Start to fetch from the host tier into `blocks` of the device."""
        raise NotImplementedError("nothing was offered")

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer, even a finished one: afterwards nothing is written to its blocks."""

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        """Pin a finished read's blocks for `owner`; return how many came from beyond the host tier."""
        return 0

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int], num_tokens: int) -> bool:
        """Make sure that blocks are in the host tier, and pin them there.

        Returns False if computing their tokens again is predicted to be cheaper, or there is no room.
        """
        return False

    def unpin(self, owner: Hashable) -> None:
        """Undo all pins of `owner`."""

    def end_hand_over(self, hand_over: str) -> None:
        """Record that a sequence computes no more for another host."""

    # Operations on the whole model, for the engine

    def begin_stores(self, everything: bool) -> None:
        """Start to copy, after a step's results were sent.

        The amount is bounded, unless `everything` or while another host waits for blocks.
        """

    def begin_hand_over(self, hand_over: str) -> None:
        """Record that a sequence will compute blocks for another host."""

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Record the present cost of recomputation; 0: unknown."""

    def reset(self) -> None:
        """End all copies from and to the device, whose content is unreliable."""

    def close(self) -> None:
        """End: afterwards nothing accesses the device's blocks."""

    @property
    def num_heard(self) -> int:
        """Count messages of hosts that compute for this one: progress for which its sequences wait."""
        return 0

    def load(self) -> TierLoad:
        """Return the state of the tiers."""
        return TierLoad()

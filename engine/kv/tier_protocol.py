"""What the engine and its scheduler ask of the tiers behind the device, and the answer where there are none.

Knows which blocks go where and which come back; refuses to know bytes, threads and files (tiered_cache.py). Blocks are
named by the hashes of prefix_index.py; `owner` is whatever a pin is taken for.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple, Protocol

from pilotlight.engine.api.protocol import NONE_CORRUPT, BlockSource, CorruptBlocks

TRANSFER_TIMEOUT_S = 5.0  # for which a sequence waits for one; then it computes
LOOKUP_TIMEOUT_S = 1.0  # for which it waits to hear what the store has

Tier = Literal["host", "disk", "store"]


class TierError(Exception):
    """A tier cannot be used here; the message says why and what to change."""


class TierLoad(NamedTuple):
    """The state of an engine's tiers."""

    num_lost: int = 0  # chains that a tier could not give back as they were (counter)
    num_pinned: int = 0  # blocks of the host tier, of all models, that are kept for who reads or waits
    handed_over_blocks_per_s: float = 0.0  # at which other hosts fetch this model's blocks; 0: not measured yet
    store: str = ""  # the name that the store's members know it by; "": there is none, or it has not answered
    store_blocks_per_s: float = 0.0  # at which blocks are read from it; 0: not measured yet
    corrupt_blocks: CorruptBlocks = NONE_CORRUPT


class Transfer(Protocol):
    """Blocks on their way, carried by another thread."""

    @property
    def is_done(self) -> bool: ...
    @property
    def num_blocks(self) -> int:
        """Blocks that arrived, from the first on, of those asked for."""


class PeerTransfer(Transfer, Protocol):
    @property
    def bytes_per_s(self) -> float:
        """The rate at which the other host's blocks have come here, in this transfer and others, as that host measures; 0: it has not."""


class Tiers:
    """The tiers behind one model's device cache. There are none here: TieredCache has them, and overrides all of it."""

    has_store = False  # that may have what no other tier has

    # Of a sequence's blocks: the scheduler's side

    def store(self, block: int, block_hash: bytes) -> None:
        """Keep a copy of a block whose content is complete, when there is time."""

    def drop(self, block: int) -> None:
        """Let a block be overwritten: afterwards it is not read for a copy."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Forget content that is known to be bad; its blocks were dropped."""

    def touch(self, hashes: Sequence[bytes]) -> None:
        """Note that a chain was found, on the device or in a tier."""

    def end_chain(self, hashes: Sequence[bytes]) -> None:
        """Note that a chain has ended: its tail is worth less than its head."""

    def place_of(self, name: bytes) -> Tier | None:
        """Return the nearest tier from which a block can be had now."""
        return None

    def pays(self, names: Sequence[bytes], num_tokens: int) -> bool:
        """Tell whether fetching these blocks is predicted to take less time than computing so many tokens."""
        return False

    def look_up(self, names: Sequence[bytes]) -> Transfer | None:
        """Begin to ask the store which of these it has: `place_of` knows it then. None: there is no store that answers."""
        return None

    def read(self, hashes: Sequence[bytes]) -> Transfer:
        """Begin to read from disk or store to the host tier."""
        raise NotImplementedError("nothing was offered")

    def ask(self, source: BlockSource, names: Sequence[bytes]) -> PeerTransfer | None:
        """Begin to fetch blocks that another host computes into the host tier. None: this host asks nobody."""
        return None

    def fetch(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> Transfer:
        """Begin to fetch from the host tier into `blocks` of the device."""
        raise NotImplementedError("nothing was offered")

    def cancel(self, transfer: Transfer) -> None:
        """End a transfer, even one that is done and was not taken: afterwards nothing is written to its blocks."""

    def take_read(self, owner: Hashable, transfer: Transfer) -> int:
        """Pin for `owner` what a read that is done has brought, and return how many blocks came from behind the host tier."""
        return 0

    def swap_out(self, owner: Hashable, hashes: Sequence[bytes], blocks: Sequence[int], num_tokens: int) -> bool:
        """Make sure that blocks are in the host tier, and pin them there; False where computing their tokens again is predicted to be cheaper, or
        there is no room."""
        return False

    def unpin(self, owner: Hashable) -> None:
        """Undo every pin taken for `owner`."""

    def end_hand_over(self, hand_over: str) -> None:
        """Note that a sequence computes no more for another host."""

    # Of the model as a whole: the engine's side

    def begin_stores(self, everything: bool) -> None:
        """Begin to copy, once a step's results have been sent: a bounded amount, unless `everything` or while another host waits for some."""

    def begin_hand_over(self, hand_over: str) -> None:
        """Note that a sequence will compute blocks for another host."""

    def note_prefill_rate(self, tokens_per_s: float) -> None:
        """Note what recomputing costs at present; 0: not known yet."""

    def reset(self) -> None:
        """End all copies from and to the device, whose content is in doubt."""

    def close(self) -> None:
        """End: afterwards nothing touches the device's blocks."""

    @property
    def num_heard(self) -> int:
        """Messages of hosts that compute for this one: progress, which its sequences wait for (counter)."""
        return 0

    def load(self) -> TierLoad:
        """Return the state of the tiers."""
        return TierLoad()

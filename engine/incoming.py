"""Sequences that wait for blocks from a tier, while others go on.

Knows who waits for which transfer, and who stands behind it for the same blocks; refuses to know blocks' bytes and who runs. A
fetch fills device blocks that its sequence holds, a read from disk none.
"""

from typing import NamedTuple

from engine.kv.tiers import Tiers, Transfer
from engine.sequence import Sequence


class Arrival(NamedTuple):
    sequence: Sequence
    transfer: Transfer
    is_fetch: bool
    num_cached: int  # blocks before the first that comes
    num_blocks: int  # that were asked for

    @property
    def first(self) -> bytes:
        return self.sequence.block_hashes[self.num_cached]


class Incoming:
    def __init__(self, tiers: Tiers, block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._arrivals: dict[Sequence, Arrival] = {}
        self._behind: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._behind)

    @property
    def fetching(self) -> list[Sequence]:
        return [arrival.sequence for arrival in self._arrivals.values() if arrival.is_fetch]

    @property
    def num_tokens(self) -> int:
        """To be computed by all of them, if all comes that was asked for."""
        coming = sum(
            len(arrival.sequence.token_ids) - (arrival.num_cached + arrival.num_blocks) * self._block_size
            for arrival in self._arrivals.values()
        )
        return coming + len(self._behind)  # they will find all but a few tokens cached

    def read(self, sequence: Sequence, num_cached: int, num_blocks: int) -> None:
        """From the disk to the host tier: blocks of the sequence's chain behind the first `num_cached`."""
        hashes = sequence.block_hashes[num_cached : num_cached + num_blocks]
        self._arrivals[sequence] = Arrival(sequence, self._tiers.read(hashes), False, num_cached, num_blocks)

    def fetch(self, sequence: Sequence, num_cached: int) -> None:
        """From the host tier into the blocks of its table behind the first `num_cached`."""
        blocks = sequence.block_table[num_cached:]
        hashes = sequence.block_hashes[num_cached : num_cached + len(blocks)]
        self._arrivals[sequence] = Arrival(sequence, self._tiers.fetch(hashes, blocks), True, num_cached, len(blocks))

    def is_coming(self, block_hash: bytes) -> bool:
        return any(arrival.first == block_hash for arrival in self._arrivals.values())

    def wait_behind(self, sequence: Sequence) -> None:
        """Somebody is fetching the same blocks: look again when a transfer has ended."""
        self._behind.append(sequence)

    def take_done(self) -> list[Arrival]:
        done = [arrival for arrival in self._arrivals.values() if arrival.transfer.is_done]
        for arrival in done:
            del self._arrivals[arrival.sequence]
        return done

    def take_behind(self) -> list[Sequence]:
        """After a transfer has ended, one way or another."""
        behind, self._behind = self._behind, []
        return behind

    def call_off(self, sequence: Sequence) -> bool:
        """Afterwards nothing is written to its blocks. False if it waits for no transfer."""
        arrival = self._arrivals.pop(sequence, None)
        if arrival is not None:
            self._tiers.cancel(arrival.transfer)
        return arrival is not None

    def drop_behind(self, sequence: Sequence) -> bool:
        if sequence not in self._behind:
            return False
        self._behind.remove(sequence)
        return True

"""Sequences that wait for blocks from a tier, while others run.

Knows which sequence waits for which transfer, and which are deferred until it has brought the same blocks; refuses to know blocks' bytes and who
runs. A fetch fills device blocks that its sequence holds, a read from disk none.
"""

from typing import NamedTuple

from engine.kv.tiers import Tiers, Transfer
from engine.sequence import Sequence


class PendingLoad(NamedTuple):
    sequence: Sequence
    transfer: Transfer
    is_fetch: bool
    num_cached: int  # blocks before the first that comes
    num_blocks: int  # that were asked for

    @property
    def first(self) -> bytes:
        return self.sequence.block_hashes[self.num_cached]


class PendingLoads:
    def __init__(self, tiers: Tiers, block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._loads: dict[Sequence, PendingLoad] = {}
        self._deferred: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._loads) + len(self._deferred)

    @property
    def fetching(self) -> list[Sequence]:
        return [load.sequence for load in self._loads.values() if load.is_fetch]

    @property
    def num_tokens(self) -> int:
        """Tokens that all of them will compute, if every block comes that was asked for."""
        coming = sum(
            len(load.sequence.token_ids) - (load.num_cached + load.num_blocks) * self._block_size
            for load in self._loads.values()
        )
        return coming + len(self._deferred)  # they will find all but a few tokens cached

    def read(self, sequence: Sequence, num_cached: int, num_blocks: int) -> None:
        """Read blocks of the sequence's chain, behind the first `num_cached`, from the disk to the host tier."""
        hashes = sequence.block_hashes[num_cached : num_cached + num_blocks]
        self._loads[sequence] = PendingLoad(sequence, self._tiers.read(hashes), False, num_cached, num_blocks)

    def fetch(self, sequence: Sequence, num_cached: int) -> None:
        """Fetch from the host tier into the blocks of the sequence's table behind the first `num_cached`."""
        blocks = sequence.block_table[num_cached:]
        hashes = sequence.block_hashes[num_cached : num_cached + len(blocks)]
        self._loads[sequence] = PendingLoad(sequence, self._tiers.fetch(hashes, blocks), True, num_cached, len(blocks))

    def is_loading(self, block_hash: bytes) -> bool:
        """Whether a transfer begins with this block."""
        return any(load.first == block_hash for load in self._loads.values())

    def defer(self, sequence: Sequence) -> None:
        """Let a sequence whose blocks are being loaded for another one wait until a transfer has ended."""
        self._deferred.append(sequence)

    def take_done(self) -> list[PendingLoad]:
        done = [load for load in self._loads.values() if load.transfer.is_done]
        for load in done:
            del self._loads[load.sequence]
        return done

    def take_deferred(self) -> list[Sequence]:
        """Return the deferred sequences, after a transfer has ended or was cancelled."""
        deferred, self._deferred = self._deferred, []
        return deferred

    def cancel(self, sequence: Sequence) -> bool:
        """End the sequence's transfer: afterwards nothing is written to its blocks. False if it waits for none."""
        load = self._loads.pop(sequence, None)
        if load is not None:
            self._tiers.cancel(load.transfer)
        return load is not None

    def drop_deferred(self, sequence: Sequence) -> bool:
        """Forget a deferred sequence. False if it is not."""
        if sequence not in self._deferred:
            return False
        self._deferred.remove(sequence)
        return True

"""Sequences that wait for blocks from a tier, while others go on.

Knows who waits for which transfer, and who stands behind it for the same blocks; refuses to know blocks and bytes. A
fetch holds its device blocks, a read from disk none.
"""

from typing import NamedTuple

from engine.kv.tiers import Transfer
from engine.sequence import Sequence


class Arrival(NamedTuple):
    sequence: Sequence
    transfer: Transfer
    first: bytes  # the name of the first block that comes
    is_fetch: bool
    num_tokens: int  # that its sequence will have computed when all has come


class Incoming:
    def __init__(self) -> None:
        self._arrivals: dict[Sequence, Arrival] = {}
        self._behind: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._arrivals) + len(self._behind)

    @property
    def fetching(self) -> list[Sequence]:
        return [arrival.sequence for arrival in self._arrivals.values() if arrival.is_fetch]

    @property
    def num_fetching(self) -> int:
        return sum(arrival.is_fetch for arrival in self._arrivals.values())

    @property
    def num_tokens(self) -> int:
        """To be computed by all of them."""
        coming = sum(len(arrival.sequence.token_ids) - arrival.num_tokens for arrival in self._arrivals.values())
        return coming + len(self._behind)  # they will find all but a few tokens cached

    def expect(self, arrival: Arrival) -> None:
        self._arrivals[arrival.sequence] = arrival

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

    def drop(self, sequence: Sequence) -> Arrival | None:
        """Forget one that waits for a transfer."""
        return self._arrivals.pop(sequence, None)

    def drop_behind(self, sequence: Sequence) -> bool:
        if sequence not in self._behind:
            return False
        self._behind.remove(sequence)
        return True

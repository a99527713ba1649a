"""The collective operations of ranks within a forward pass, and transfers between stages.

The operations sum hidden states, join logits, and distribute tokens that the first rank has chosen; if each rank has its own tokens, they also
exchange rows between all ranks and send rows to the first one. Sums are computed in one order, so that every rank has the same bits. This module
knows tensors and process groups of torch.distributed, and is independent of models and steps; rank_links.py makes the groups.
"""

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pilotlight.engine.weights.shard import Shard

_MOST_STEPS = 1 << 20  # step numbers start again at 0 after so many steps


class Exchanged(NamedTuple):
    """Counters of the operations in which one rank has taken part."""

    sums: int = 0
    summed_bytes: int = 0
    joins: int = 0
    joined_bytes: int = 0  # bytes of all ranks' parts
    exchanges: int = 0
    exchanged_bytes: int = 0  # bytes sent to other ranks


class Communicator:
    def __init__(
        self,
        group: Any | None,
        shard: Shard,
        pipe: "StagePipe | None" = None,
        rank: int = 0,
        size: int = 1,
        sharing: Any | None = None,
    ) -> None:
        """Set up a rank's groups.

        `group`: a process group of torch.distributed with `size` ranks; None for a single rank. `shard`: this rank's part of matrices; `sharing`: the
        group of the ranks that share matrices, if these are not all of `group`. `pipe`: links to other stages.
        """
        self._group = group
        self._sharing = group if sharing is None else sharing
        self.shard = shard
        self.pipe = pipe
        self.rank = rank
        self.size = size
        self.exchanged = Exchanged()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def copies(self) -> int:
        """Return the number of copies of the attention, each on ranks that together have all matrices."""
        return self.size // self.shard.size

    @property
    def copy(self) -> int:
        """Return the index of this rank's copy: ranks with the same shard are consecutive."""
        return self.rank % self.copies

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of partial results over the ranks that share matrices, in place if x is contiguous."""
        return x if self.shard.size == 1 else self._summed(x, self._sharing)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in place if x is contiguous."""
        return self._summed(x, self._group)

    def _summed(self, x: torch.Tensor, group: Any | None) -> torch.Tensor:
        if group is None:
            return x
        x = x.contiguous()
        group.allreduce([x]).wait()
        done = self.exchanged
        self.exchanged = done._replace(sums=done.sums + 1, summed_bytes=done.summed_bytes + x.nbytes)
        return x

    def join(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return x [rows, sizes[rank]] of all ranks that share matrices, joined to [rows, sum(sizes)]."""
        if self._sharing is None or self.shard.size == 1:
            return x
        widest = max(sizes)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in sizes]
        self._sharing.allgather([parts], [x]).wait()
        done = self.exchanged
        self.exchanged = done._replace(joins=done.joins + 1, joined_bytes=done.joined_bytes + len(sizes) * x.nbytes)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def from_rank(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor x of one rank, on all ranks. Elsewhere x has the same shape and is overwritten."""
        if self._group is None:
            return x
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        self._group.broadcast([x], options).wait()
        return x

    def exchange(self, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send rows to all ranks, and return the received rows, in the order of the ranks.

        `sent`: number of rows for each rank; `received`: number of rows from each rank.
        """
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        if self._group is None:
            return arrived.copy_(rows)
        self._group.alltoall_base(arrived, rows.contiguous(), list(received), list(sent), dist.AllToAllOptions()).wait()
        of_row = rows[:1].nbytes if len(rows) else 0
        done, going = self.exchanged, sum(sent) - sent[self.rank]
        self.exchanged = done._replace(
            exchanges=done.exchanges + 1, exchanged_bytes=done.exchanged_bytes + going * of_row
        )
        return arrived

    def exchange_counts(self, sent: torch.Tensor) -> tuple[list[int], list[int]]:
        """Exchange the numbers of rows that ranks will send, [ranks] int64; return `sent` and `received`."""
        one = [1] * self.size
        going, coming = torch.stack([sent, self.exchange(sent, one, one)]).tolist()
        return going, coming

    def to_first(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Return the rows of all copies, in order, on the ranks of the first copy; none on other ranks.

        `counts`: number of rows of each copy. A rank gets the rows from the ranks with the same shard.
        """
        sent, received, first = [0] * self.size, [0] * self.size, self.rank - self.copy
        sent[first] = counts[self.copy]
        if self.copy == 0:
            received[first : first + self.copies] = counts
        return self.exchange(rows, sent, received)


class StagePipe:
    """One rank's links to the stages before and after its own, in a ring.

    The last stage's hidden states go back to the first, which has the head. Every rank numbers the steps alike. A sent tensor is kept until it has
    been transferred, so that no stage waits for the next one to be ready. The way back is a separate group, because NCCL has one queue for two ranks:
    in a single group, two stages would wait for each other, the first one to send the next step, the second one to send this step back.
    """

    def __init__(self, forth: Any, back: Any, rank: int, per_stage: int, num_stages: int) -> None:
        """`forth`, `back`: groups of all stages' ranks, ordered by stage.

        `forth` leads to the next stage, `back` from the last to the first.
        """
        size = per_stage * num_stages
        self.stage, self.num_stages = rank // per_stage, num_stages
        self._before, self._behind = (rank - per_stage) % size, (rank + per_stage) % size
        self._outgoing = back if self.is_last else forth
        self._incoming = back if self.is_first else forth
        self._going: deque[tuple[Any, torch.Tensor]] = deque()
        self._steps = count()
        self.sent = 0  # counter of bytes

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def next_step(self) -> int:
        """Return the number of a new step: each stage has the same steps, in the same order."""
        return next(self._steps) % _MOST_STEPS

    def send(self, x: torch.Tensor, step: int) -> None:
        """Send hidden states to the next stage."""
        x = x.contiguous()
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()
        self._going.append((self._outgoing.send([x], self._behind, step), x))
        self.sent += x.nbytes

    def receive(self, into: torch.Tensor, step: int) -> torch.Tensor:
        """Return the hidden states of the previous stage, in `into`."""
        self._incoming.recv([into], self._before, step).wait()
        return into

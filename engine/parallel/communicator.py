"""What ranks exchange within a forward pass: sums of hidden states, joined logits, tokens that the first rank has chosen; and between stages.

Knows tensors and one group of torch.distributed's, Gloo on CPUs and NCCL on GPUs; refuses to know models and steps. Sums are made in one order, so
every rank has the same bits.
"""

import socket
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed has them only where it was built with them
    PrefixStore,
    Store,
    TCPStore,
)

from engine.weights.shard import WHOLE, Shard

LOCALHOST = "127.0.0.1"
# Longer than any step: a rank that hangs is found out by its site's step deadline, one that dies by its closed socket.
_TIMEOUT = timedelta(minutes=10)
_MOST_STEPS = 1 << 20  # before their numbers come again


class Exchanged(NamedTuple):
    """What one rank has taken part in so far (counters)."""

    sums: int = 0
    summed_bytes: int = 0
    joins: int = 0
    joined_bytes: int = 0  # of all ranks' parts


class Communicator:
    def __init__(self, group: Any | None, shard: Shard, pipe: "StagePipe | None" = None) -> None:
        """`group`: a process group of torch.distributed's, of as many ranks as `shard` says; None: it is alone. `pipe`: to other stages."""
        self._group = group
        self.shard = shard
        self.pipe = pipe
        self.exchanged = Exchanged()

    @property
    def is_first(self) -> bool:
        return self.shard.rank == 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, in place where x is contiguous."""
        if self._group is None:
            return x
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        done = self.exchanged
        self.exchanged = done._replace(sums=done.sums + 1, summed_bytes=done.summed_bytes + x.nbytes)
        return x

    def join(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return all ranks' columns side by side: x [rows, sizes[rank]] -> [rows, sum(sizes)]."""
        if self._group is None:
            return x
        widest = max(sizes)
        if x.shape[1] < widest:
            x = torch.nn.functional.pad(x, (0, widest - x.shape[1]))
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in sizes]
        self._group.allgather([parts], [x]).wait()
        done = self.exchanged
        self.exchanged = done._replace(joins=done.joins + 1, joined_bytes=done.joined_bytes + len(sizes) * x.nbytes)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def from_rank(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """Return that rank's tensor; the others' has its shape, and is overwritten."""
        if self._group is None:
            return x
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = rank, 0
        self._group.broadcast([x], options).wait()
        return x


class StagePipe:
    """One rank's ways to the stages before and behind its own, in a ring: the last one's hidden states go back to the first, which has the head.

    Every rank numbers the steps alike. What is sent is kept until it has gone, so that no stage waits for the next one to be ready for it.
    """

    def __init__(self, group: Any, rank: int, per_stage: int, num_stages: int) -> None:
        """`group`: of all stages' ranks, each stage's one behind another."""
        self._group = group
        size = per_stage * num_stages
        self.stage, self.num_stages = rank // per_stage, num_stages
        self._before, self._behind = (rank - per_stage) % size, (rank + per_stage) % size
        self._going: deque[tuple[Any, torch.Tensor]] = deque()
        self._steps = count()
        self.sent = 0  # counter: bytes

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    def next_step(self) -> int:
        """Return the number of a step that begins: each stage's steps are the same, in the same order."""
        return next(self._steps) % _MOST_STEPS

    def send(self, x: torch.Tensor, step: int) -> None:
        """Send hidden states to the next stage."""
        x = x.contiguous()
        while self._going and self._going[0][0].is_completed():
            self._going.popleft()
        self._going.append((self._group.send([x], self._behind, step), x))
        self.sent += x.nbytes

    def receive(self, into: torch.Tensor, step: int) -> torch.Tensor:
        """Return the hidden states of the stage before, in the tensor that is given for them."""
        self._group.recv([into], self._before, step).wait()
        return into


class RankLinks(NamedTuple):
    """One rank's place, and its ways to the others: a model that is loaded warms up beside those that serve."""

    shard: Shard = WHOLE  # of its stage
    num_stages: int = 1
    serving: Communicator | None = None  # None: it is alone
    loading: Communicator | None = None

    @property
    def stage(self) -> int:
        return 0 if self.serving is None or self.serving.pipe is None else self.serving.pipe.stage


def new_store() -> TCPStore:
    """Return the first rank's store, at which ranks of this machine find each other; it listens on a port of its own."""
    listener = socket.create_server((LOCALHOST, 0))  # a store's own would listen on every address of the machine
    port = listener.getsockname()[1]
    return TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def link(rank: int, size: int, num_stages: int, store: Store, device: torch.device) -> RankLinks:
    """Connect one rank with the others; returns when all of them have called it. `size`: of all stages together."""
    per_stage = size // num_stages
    shard, stage = Shard(rank % per_stage, per_stage), rank // per_stage

    def communicator(name: str) -> Communicator:
        pipe = None
        if num_stages > 1:
            pipe = StagePipe(_group(f"{name}-pipe", rank, size, store, device), rank, per_stage, num_stages)
        shared = _group(f"{name}-{stage}", shard.rank, per_stage, store, device) if per_stage > 1 else None
        return Communicator(shared, shard, pipe)

    return RankLinks(shard, num_stages, communicator("serving"), communicator("loading"))


def _group(name: str, rank: int, size: int, store: Store, device: torch.device) -> Any:
    named = PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(named, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [gloo.create_device(hostname=LOCALHOST)]
    return gloo(named, rank, size, options)

"""The process groups that link ranks: Gloo on CPUs, NCCL on GPUs.

Ranks find each other through the first rank's store.
"""

import socket
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (  # torch.distributed exports them only in builds that have them
    PrefixStore,
    Store,
    TCPStore,
)

from pilotlight.engine.parallel.communicator import Communicator, StagePipe
from pilotlight.engine.planning.parallelism import Parallelism, RankPlace
from pilotlight.engine.weights.shard import WHOLE, Shard

LOCALHOST = "127.0.0.1"
# Limit of a collective, longer than any step: the site's step deadline detects a hanging rank, and its closed socket a dead one.
_TIMEOUT = timedelta(minutes=10)


class RankLinks(NamedTuple):
    """One rank's position in the group, and its links to the other ranks.

    A model that is being loaded has separate links, to warm up while other models serve.
    """

    shard: Shard = WHOLE  # this rank's part of the matrices of its stage
    num_stages: int = 1
    serving: Communicator | None = None  # None for a single rank
    loading: Communicator | None = None

    @property
    def stage(self) -> int:
        return 0 if self.serving is None or self.serving.pipe is None else self.serving.pipe.stage

    @property
    def rank(self) -> int:
        """Return this rank's index among all ranks of its stage."""
        return 0 if self.serving is None else self.serving.rank


def new_store(address: str = LOCALHOST) -> TCPStore:
    """Return the first rank's store, through which ranks find each other, on a free port of `address`."""
    listener = socket.create_server((address, 0))  # a socket that the store opened would listen on every address
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def link(rank: int, degrees: Parallelism, store: Store, device: torch.device, address: str = LOCALHOST) -> RankLinks:
    """Connect one rank with the other ranks; return when all ranks have called this function.

    `rank`: index among the ranks of all stages; `address`: address of this rank.
    """
    size, per_stage, num_stages = degrees.size, degrees.per_stage, degrees.pp
    stage, within = divmod(rank, per_stage)
    shard = RankPlace(degrees, within).shard

    def communicator(name: str) -> Communicator:
        pipe = None
        if num_stages > 1:
            forth, back = (_group(f"{name}-{way}", rank, size, store, device, address) for way in ("forth", "back"))
            pipe = StagePipe(forth, back, rank, per_stage, num_stages)
        shared = _group(f"{name}-{stage}", within, per_stage, store, device, address) if per_stage > 1 else None
        sharing = None
        if 1 < degrees.tp < per_stage:
            copy = f"{name}-{stage}-{within % degrees.copies}"
            sharing = _group(copy, shard.rank, shard.size, store, device, address)
        return Communicator(shared, shard, pipe, within, per_stage, sharing)

    return RankLinks(shard, num_stages, communicator("serving"), communicator("loading"))


def _group(name: str, rank: int, size: int, store: Store, device: torch.device, address: str) -> Any:
    named = PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(named, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _TIMEOUT
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(named, rank, size, options)

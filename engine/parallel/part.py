"""The memory and the parts of models on a rank that is not the first."""

from collections import deque
from pathlib import Path
from typing import NamedTuple

import torch
from torch._C._distributed_c10d import TCPStore

from pilotlight.engine.adapters.adapter_store import FollowedAdapters
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.core.step import StepInput
from pilotlight.engine.device.device import make_arena
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.arena import Arena
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.kv.transfer.block_copier import BlockCopier, make_copier
from pilotlight.engine.loading.model_loading import ModelLoading
from pilotlight.engine.loading.opened_source import opened_source
from pilotlight.engine.models.model import Model
from pilotlight.engine.parallel.channel import Meeting, RankChannel
from pilotlight.engine.parallel.orders import FetchBlocks, LoadPart, StoreBlocks, WarmUpPart
from pilotlight.engine.parallel.part_runner import ForwardedPart, PartRunner
from pilotlight.engine.parallel.rank_links import RankLinks, link
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.weights.digests import content_fingerprint
from pilotlight.engine.weights.relocation import HugePages, Relocation


class PartMemory(NamedTuple):
    arena: Arena
    links: RankLinks


def make_part_arena(config: HostConfig, rank: int) -> Arena:
    """Allocate this rank's KV memory. Raises CheckpointError."""
    far = {"ray:cpu": "cpu", "ray:cuda": "cuda:0"}  # in a process that Ray starts, only the rank's GPU is visible
    return make_arena(config, far.get(config.group[rank], config.group[rank]))


def connect(arena: Arena, rank: int, config: HostConfig, meeting: Meeting) -> PartMemory:
    """Connect this rank with the other ranks through the first rank's store."""
    store = TCPStore(meeting.address, meeting.port, is_master=False)
    return PartMemory(arena, link(rank, Parallelism.of_host(config), store, arena.device, meeting.own))


class FollowedModel(NamedTuple):
    """One model's part on this rank."""

    loading: ModelLoading
    model: Model
    layout: CacheLayout
    runner: PartRunner
    adapters: FollowedAdapters
    copier: BlockCopier
    under_weights: HugePages | Relocation[Model] | None
    started: deque[ForwardedPart]  # steps that are passing through other stages; only on ranks of the first stage
    drafting: ModelRunner | None  # runner of the drafter with weights

    def compute(self, step: StepInput) -> None:
        started = self.runner.begin(step)
        if self.runner.is_pipelined:
            self.started.append(started)
        else:
            self.runner.finish(started)

    def guess(self, step: StepInput) -> None:
        assert self.drafting is not None
        self.drafting.forward(step)

    def finish(self, number: int) -> None:
        """Finish a step and drop earlier steps; do nothing on ranks of later stages."""
        while self.started:
            started = self.started.popleft()
            if started.number == number:
                self.runner.finish(started)
                return

    def warm_up(self, order: WarmUpPart) -> None:
        """Compute a short prompt with the other ranks."""
        self.loading.warm_up(self.model, self.layout, order.prompt, order.with_decode)

    def copy(self, order: StoreBlocks | FetchBlocks, channel: RankChannel) -> None:
        """Send blocks to the first rank, or receive them."""
        staged = bytearray(self.layout.block_bytes)
        view, mark = memoryview(staged), self.copier.mark()
        for block in order.blocks:
            if isinstance(order, StoreBlocks):
                self.copier.store([block], [view], mark)
                channel.send_bytes(view)
            else:
                channel.receive_into(view)
                self.copier.fetch([block], [view], mark)

    def close(self) -> None:
        self.adapters.close()
        if self.under_weights is not None:
            self.under_weights.close()


@torch.inference_mode()
def load_part(order: LoadPart, config: HostConfig, memory: PartMemory) -> FollowedModel:
    """Load this rank's part of a model. Raises CheckpointError."""
    check_checkpoint(order)
    with opened_source(order.spec, config, memory.arena, memory.links) as loading:
        layout = loading.layout()
        loaded = loading.load(order.context_length, layout)
        drafts = loading.load_drafts(loaded.model, order.context_length)
        runner = loading.runner_in(order.first_slab, order.num_blocks, loaded.model, layout, drafts)
        assert isinstance(runner, PartRunner), "a rank has others"
        drafting = drafts and loading.runner(drafts.layers, layout, runner.kv_cache, memory.links.serving)
        moving = loading.start_moving(loaded, runner)
        adapters, copier = FollowedAdapters(runner), make_copier(runner.kv_cache)
        return FollowedModel(loading, loaded.model, layout, runner, adapters, copier, moving, deque(), drafting)


def check_checkpoint(order: LoadPart) -> None:
    """Raise CheckpointError if this machine's checkpoint differs from that of the first rank."""
    path = Path(order.spec.path)
    try:
        found = content_fingerprint(path) if order.checkpoint else b""
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read there: {error.strerror}; each machine needs its own copy"
        ) from None
    if found != order.checkpoint:
        raise CheckpointError(
            f"{path} holds another checkpoint there than on the first rank's machine: copy the same one to both"
        )

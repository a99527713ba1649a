"""A rank that is not the first: a process that executes the first rank's orders, and ends with it.

Orders for steps and changes of memory arrive on one channel; a separate thread loads models, and another copies blocks, as on the first rank. If a
step fails the process ends, because the other ranks wait for its part: its closed connections end their wait.

python -m pilotlight.engine.parallel.follower '{"rank": 1, ...}'     started only by engine/parallel/ranks.py

On another machine Ray starts the process, as a `FarRank`. This module imports neither Ray nor torch.
"""

import json
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.api.struct import replace
from pilotlight.engine.host.process import configure_process
from pilotlight.engine.parallel.channel import NUM_CHANNELS, Meeting, RankChannel
from pilotlight.engine.parallel.far.far_orders import ChannelOf, FarStart
from pilotlight.engine.parallel.orders import (
    ClearSlab,
    ComputeStep,
    DropImage,
    DropModel,
    EncodeImage,
    FetchBlocks,
    FinishStep,
    GuessTokens,
    LoadPart,
    PlaceAdapter,
    RankReply,
    ReadAdapter,
    ResetBlocks,
    ScrubBlocks,
    StoreBlocks,
    WarmUpPart,
)
from pilotlight.engine.parallel.release import difference
from pilotlight.support.logs import inherit_logging
from pilotlight.support.parent_death import die_with

if TYPE_CHECKING:
    from pilotlight.engine.kv.arena import Arena
    from pilotlight.engine.parallel.part import FollowedModel, PartMemory

log = logging.getLogger(__name__)


class Follower:
    def __init__(
        self, config: HostConfig, memory: "PartMemory", orders: RankChannel, replies: RankChannel, copies: RankChannel
    ) -> None:
        self._config = config
        self._memory = memory
        self._orders = orders
        self._replies = replies
        self._copies = copies
        self._models: dict[str, FollowedModel] = {}
        self._loads: queue.SimpleQueue[LoadPart | WarmUpPart] = queue.SimpleQueue()

    def run(self) -> None:
        """Execute orders until the first rank is gone."""
        for work, name in ((self._load_all, "rank-loader"), (self._copy_all, "rank-copier")):
            threading.Thread(target=_or_end, args=(work,), name=name, daemon=True).start()
        while True:
            try:
                order = self._orders.receive()
            except EOFError:
                return
            self._follow(order)

    def _follow(self, order: object) -> None:
        match order:
            case ComputeStep(model, step):
                self._models[model].compute(step)
            case GuessTokens(model, step):
                self._models[model].guess(step)
            case FinishStep(model, number):
                self._models[model].finish(number)
            case ScrubBlocks(model, blocks):
                self._models[model].runner.scrub(blocks)
            case ResetBlocks(model):
                self._models[model].runner.reset()
            case ReadAdapter(model, source):
                self._models[model].adapters.read(source)
            case PlaceAdapter(model, slot, source):
                self._models[model].adapters.place(slot, source)
            case EncodeImage(model, name, piece):
                self._models[model].runner.encode_image(name, piece)
            case DropImage(model, name):
                self._models[model].runner.images.drop(name)
            case ClearSlab(slab):
                self._memory.arena.clear(slab)
            case LoadPart() | WarmUpPart():
                self._loads.put(order)
            case DropModel(model):
                if (dropped := self._models.pop(model, None)) is not None:
                    dropped.close()
            case _:
                raise AssertionError(f"{order!r} is no order")

    def _load_all(self) -> None:
        from pilotlight.engine.parallel.part import load_part

        while True:
            order = self._loads.get()
            if isinstance(order, WarmUpPart):
                self._models[order.model].warm_up(order)
                continue
            name, problem = order.spec.name, None
            try:
                self._models[name] = load_part(order, self._config, self._memory)
            except Exception as error:  # any error is sent to the first rank
                log.exception("loading this rank's part of %s failed", name)
                problem = str(error) or type(error).__name__
            self._replies.send(RankReply(name, problem))

    def _copy_all(self) -> None:
        while True:
            try:
                order = self._copies.receive()
            except EOFError:
                return
            assert isinstance(order, StoreBlocks | FetchBlocks)
            self._models[order.model].copy(order, self._copies)
            self._copies.send(RankReply(order.model))


def _or_end(work: Any) -> None:
    """Run a thread's work; end the process if it fails, because a rank needs all of its threads."""
    try:
        work()
    except BaseException:
        log.exception("this rank ends")
        os._exit(1)


def main(words: list[str]) -> None:
    described = json.loads(words[0])
    die_with(
        described["parent"]
    )  # elsewhere than on Linux, this rank ends when its sockets to the first rank are closed
    # sent by a terminal or by a program's name: the first rank decides when to end
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    channels = [RankChannel.inherited(fd) for fd in described["channels"]]
    meeting = Meeting(described["address"], described["port"], described["address"])
    run_rank(described["rank"], described["config"], described["threads"], channels, meeting)


class FarRank:
    """The Ray actor of a rank on another machine."""

    def follow(self, start: FarStart) -> str:
        """Execute the first rank's orders until this process ends. Return the reason if the rank cannot start."""
        if problem := difference(start.release):
            return problem
        from pilotlight.engine.parallel.far import network

        threads = max(1, len(os.sched_getaffinity(0)) // start.neighbours)
        channels = []
        try:
            for number in range(NUM_CHANNELS):
                channel = network.connect(start.address, start.port, start.key)
                channel.send(ChannelOf(start.rank, number))
                channels.append(channel)
        except OSError as error:
            return f"the first rank cannot be reached at {start.address}, port {start.port}: {error}"
        own = _own_address(start.address)
        run_rank(start.rank, start.config, threads, channels, Meeting(start.address, start.store_port, own))
        raise AssertionError("a rank ends with its process")


def _own_address(other: str) -> str:
    """Return this machine's address in the network of the machine `other`."""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))  # connecting a UDP socket sends nothing
        address: str = probe.getsockname()[0]
        return address


def run_rank(rank: int, described: str, threads: int, channels: Sequence[RankChannel], meeting: Meeting) -> NoReturn:
    """Run as a rank until this process ends.

    `described`: a HostConfig as JSON. `threads`: number of threads if the config has none.
    """
    configure_process()
    os.environ["OMP_NUM_THREADS"] = str(threads)
    inherit_logging(f"rank{rank}")
    orders, replies, copies = channels
    try:
        config, arena = _prepare(described, rank, threads)
        replies.send(RankReply(""))
    except Exception as error:
        log.exception("this rank cannot be made ready")
        replies.send(RankReply("", str(error) or type(error).__name__))
        os._exit(1)
    try:
        from pilotlight.engine.parallel.part import connect

        memory = connect(arena, rank, config, meeting)
        Follower(config, memory, orders, replies, copies).run()
    except BaseException:
        log.exception("this rank ends")
        os._exit(1)
    os._exit(0)  # an orderly end of the interpreter would wait for threads inside torch


def _prepare(described: str, rank: int, threads: int) -> "tuple[HostConfig, Arena]":
    import msgspec

    from pilotlight.engine.parallel.part import make_part_arena

    config = msgspec.json.decode(described, type=HostConfig)
    config = replace(config, threads=config.threads or threads)
    return config, make_part_arena(config, rank)


if __name__ == "__main__":
    main(sys.argv[1:])

"""The first rank's side of a group: starts the other ranks, sends orders, detects losses, ends them.

The other ranks are child processes or on other machines. If a rank is lost the host ends; its site starts another host, where open sequences
continue. This module is independent of what an order does.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch

from pilotlight.engine.api.errors import CheckpointError, RankLostError
from pilotlight.engine.api.protocol import HostConfig, ModelSpec
from pilotlight.engine.core.step import ChoiceRow, RunResult, StepInput
from pilotlight.engine.execution.runner import Forwarded, LaunchedStep, ModelRunner
from pilotlight.engine.kv.pool.block_parts import BlockParts
from pilotlight.engine.kv.transfer.block_copier import BlockCopier
from pilotlight.engine.parallel.channel import NUM_CHANNELS, RankChannel, packed
from pilotlight.engine.parallel.far.far_ranks import FarRanks
from pilotlight.engine.parallel.orders import (
    ClearSlab,
    ComputeStep,
    DropModel,
    FetchBlocks,
    FinishStep,
    GuessTokens,
    LoadPart,
    RankReply,
    ResetBlocks,
    ScrubBlocks,
    StoreBlocks,
    WarmUpPart,
)
from pilotlight.engine.parallel.part_runner import ForwardedPart, PartRunner
from pilotlight.engine.parallel.rank_links import LOCALHOST, RankLinks, link, new_store
from pilotlight.engine.planning.parallelism import Parallelism
from pilotlight.engine.weights.digests import content_fingerprint

log = logging.getLogger(__name__)

_END_GRACE_S = 2.0
_LOSS_KNOWN_S = 1.0
_LOOK_S = 1.0
SUSPENDED_S = 5.0  # a rank that is stopped for longer, such as by a debugger, is killed

T = TypeVar("T")
R = TypeVar("R")


class RankGroup:
    def __init__(
        self,
        config: HostConfig,
        device: torch.device,
        on_lost: Callable[[str], None] = lambda why: None,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        """Start the other ranks, and return when all of them are connected.

        `device`: device of this rank. `on_lost`: called from a thread with the reason when a rank has ended unexpectedly. `on_wait`: called every
        second with the reason while the start waits for other machines. Raises CheckpointError if a rank cannot be prepared.
        """
        degrees = Parallelism.of_host(config)
        self.size, self.num_stages, self.copies = degrees.size, degrees.pp, degrees.copies
        self._on_lost = on_lost
        self._is_closing = False
        self.lost: str | None = None  # description of the loss of a rank, if any
        self._was_killed = False  # the lost rank was killed by a signal, or its machine is lost
        self._has_lost = threading.Event()
        self._has_closed = threading.Event()
        self._loading = threading.Lock()
        # One copy at a time: several threads copy blocks, and a reply belongs to the last order on its channel.
        self._copying = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank: processes of the ranks on this machine
        self._channels: list[tuple[RankChannel, ...]] = []
        self._far = FarRanks(config, on_wait) if config.far_ranks else None
        try:
            address = LOCALHOST if self._far is None else self._far.address
            store = new_store(address)
            channels = {rank: self._start(rank, config, address, store.port) for rank in config.near_ranks[1:]}
            if self._far is not None:
                channels |= self._far.start(store.port)
            # For every other rank: channels for orders, for replies to orders, and for copies of blocks (by another thread).
            self._channels = [channels[rank] for rank in range(1, self.size)]
            self._replies("", "be made ready")
            self._watch_all()
            self.links: RankLinks = link(0, degrees, store, device, address)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def send(self, order: object) -> None:
        """Send an order to all ranks. Raises RankLostError."""
        message = packed(order)
        for rank, (orders, _, _) in enumerate(self._channels, 1):
            try:
                orders.send_packed(message)
            except OSError:
                raise self.loss(f"rank {rank} is gone") from None

    def loss(self, why: str) -> RankLostError:
        """Return the error for a group that cannot continue, with the rank that has ended.

        `why`: the message if no rank is known to have ended.
        """
        self._has_lost.wait(_LOSS_KNOWN_S)  # a rank's socket closes before its process has ended
        # The end of a process is known at once, even on another machine; the end of that machine only after several seconds.
        far_ranks = () if self._far is None else self._far.ranks
        is_machine_lost = self.lost is None and any([self._channels[rank - 1][0].is_gone for rank in far_ranks])
        return RankLostError(self.lost or why, self._was_killed or is_machine_lost)

    def load(self, spec: ModelSpec, context_length: int, first_slab: int, num_blocks: int) -> None:
        """Let all ranks start to load their parts of a model; `until_loaded` waits for them.

        The model's blocks are at the same place in all arenas.
        """
        checkpoint = content_fingerprint(Path(spec.path)) if self._far is not None else b""
        self.send(LoadPart(spec, context_length, first_slab, num_blocks, checkpoint))

    def until_loaded(self, model: str) -> None:
        """Wait until all ranks have loaded their parts. Raises CheckpointError if a rank cannot."""
        self._replies(model, "load its part")

    def abandon(self, model: str) -> None:
        """Give up a load that failed on this rank: let the other ranks finish it, and drop their parts."""
        with suppress(CheckpointError, RankLostError):
            self.until_loaded(model)
        self.drop(model)

    def warm_up(self, model: str, prompt: Sequence[int], with_decode: bool) -> None:
        """Let the other ranks compute a short prompt. This rank must then do the same."""
        self.send(WarmUpPart(model, tuple(prompt), with_decode))

    def runner(self, own: ModelRunner, model: str) -> "RankedRunner":
        """Return a runner of the model that also sends its steps to the other ranks."""
        return RankedRunner(own, model, self)

    def drafting(self, own: ModelRunner, model: str) -> "RankedRunner":
        """Return a runner of the model's drafter that also sends its steps to the other ranks."""
        return RankedRunner(own, model, self, GuessTokens)

    def copier(self, own: BlockCopier, model: str, parts: BlockParts) -> "RankedCopier":
        """Return the object that copies all ranks' parts of the model's blocks."""
        return RankedCopier(own, model, self, parts)

    def drop(self, model: str) -> None:
        with suppress(RankLostError):  # a lost rank holds nothing
            self.send(DropModel(model))

    def clear(self, slab: int) -> None:
        with suppress(RankLostError):  # the next step reports it
            self.send(ClearSlab(slab))

    def store(self, model: str, into: "Sequence[RankBlocks]") -> None:
        """Copy blocks of the other ranks to host memory. `into`: the blocks and buffers of each rank.

        Raises RankLostError.
        """
        orders = [StoreBlocks(model, tuple(one.blocks)) for one in into]
        self._copy(orders, into, lambda copies, place: copies.receive_into(place))

    def fetch(self, model: str, source: "Sequence[RankBlocks]") -> None:
        """Copy blocks of the other ranks from host memory, and wait until the copies are complete.

        `source`: the blocks and buffers of each rank. Raises RankLostError.
        """
        orders = [FetchBlocks(model, tuple(one.blocks)) for one in source]
        self._copy(orders, source, lambda copies, place: copies.send_bytes(place))

    def close(self) -> None:
        """End the other ranks, and wait for them."""
        self._is_closing = True
        self._has_closed.set()
        for channels in self._channels:
            for channel in channels:
                channel.close()  # a rank ends when its first rank is gone
        if self._far is not None:
            self._far.close()
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_GRACE_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _start(self, rank: int, config: HostConfig, address: str, port: int) -> tuple[RankChannel, ...]:
        """Start a rank on this machine; return the channels to it."""
        pairs = [RankChannel.pair() for _ in range(NUM_CHANNELS)]
        fds = [end.fileno() for _, end in pairs]
        threads = threads_of(config)
        described = {
            "rank": rank,
            "address": address,
            "port": port,
            "parent": os.getpid(),
            "channels": fds,
            "threads": threads,
            "config": msgspec.json.encode(config).decode(),
        }
        try:
            self._processes[rank] = subprocess.Popen(
                [sys.executable, "-m", "pilotlight.engine.parallel.follower", json.dumps(described)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
        finally:
            for _, end in pairs:
                end.close()
        return tuple([channel for channel, _ in pairs])

    def _watch_all(self) -> None:
        ends: dict[str, Callable[[], str]] = {
            f"rank-{rank}": partial(self._ended, rank, process) for rank, process in self._processes.items()
        }
        threading.Thread(target=self._end_suspended, name="rank-states", daemon=True).start()
        if self._far is not None:
            ends["far-ranks"] = partial(self._far_ended, self._far)
        for name, until_lost in ends.items():
            threading.Thread(target=self._watch, args=(until_lost,), name=name, daemon=True).start()

    def _watch(self, until_lost: Callable[[], str]) -> None:
        why = until_lost()
        if not self._is_closing:
            self.lost = why
            self._has_lost.set()
            log.error("%s: its group cannot continue", why)
            self._on_lost(why)

    def _ended(self, rank: int, process: "subprocess.Popen[bytes]") -> str:
        code = process.wait()
        self._was_killed = code in (-signal.SIGKILL, -signal.SIGTERM)
        return f"rank {rank} (pid {process.pid}) ended with status {code}"

    def _far_ended(self, far: FarRanks) -> str:
        said = far.until_lost()
        self._was_killed = said.was_killed
        return said.reason

    def _end_suspended(self) -> None:
        """Kill a rank that stays suspended by a signal.

        Other ranks, and the thread that sends orders, would otherwise wait for it until their site's deadline.
        """
        stopped: Counter[int] = Counter()  # consecutive checks at which a rank was stopped
        while not self._has_closed.wait(_LOOK_S):
            for rank, process in self._processes.items():
                stopped[rank] = stopped[rank] + 1 if is_suspended(process.pid) else 0
                if stopped[rank] * _LOOK_S > SUSPENDED_S:
                    log.error("rank %d (pid %d) was stopped for %g s; it is killed", rank, process.pid, SUSPENDED_S)
                    process.kill()

    def _replies(self, model: str, what: str) -> None:
        problems = []
        with self._loading:
            for rank, (_, replies, _) in enumerate(self._channels, 1):
                try:
                    reply = replies.receive()
                except EOFError:
                    raise CheckpointError(f"{self._name(rank)} ended before it could {what}") from None
                assert isinstance(reply, RankReply)
                assert reply.model == model, f"rank {rank} replied for {reply.model} instead of {model}"
                if reply.problem is not None:
                    problems.append(f"{self._name(rank)} cannot {what}: {reply.problem}")
        if problems:
            raise CheckpointError("; ".join(problems))

    def _name(self, rank: int) -> str:
        machine = "" if self._far is None else self._far.machines.get(rank, "")
        return f"rank {rank} on {machine}" if machine else f"rank {rank}"

    def _copy(
        self,
        orders: Sequence[StoreBlocks | FetchBlocks],
        of_ranks: "Sequence[RankBlocks]",
        move: Callable[[RankChannel, memoryview], None],
    ) -> None:
        both = zip(self._channels, orders, of_ranks, strict=True)
        busy = [(copies, order, one.places) for (_, _, copies), order, one in both if one.blocks]
        try:
            with self._copying:
                for copies, order, _ in busy:
                    copies.send(order)
                for copies, _, places in busy:
                    for place in places:
                        move(copies, place)
                for copies, _, _ in busy:
                    copies.receive()  # wait until done
        except (OSError, EOFError):
            raise self.loss("a rank is gone") from None


class RankedRunner:
    """A model's runner on the first rank, which sends orders to the other ranks first."""

    num_graphs = graph_failures = 0  # ranks of a group record no graphs

    def __init__(
        self, own: ModelRunner, model: str, group: RankGroup, order: Callable[[str, StepInput], object] = ComputeStep
    ) -> None:
        """`order`: makes the order for the other ranks from a model's name and a step."""
        assert isinstance(own, PartRunner), "a group has several ranks"
        self.own = own
        self._order = order
        # The most steps at once; not 2, because the next step would use a token that is not chosen yet: other stages still compute the previous step.
        self.depth = max(3, group.num_stages) if own.is_pipelined else own.depth
        self._model = model
        self._group = group

    def forward(self, step: StepInput) -> "Forwarded | ForwardedPart":
        """Compute a step with all ranks.

        Raises RankLostError for any error: the other ranks have continued, so the group is out of step.
        """
        self._group.send(self._order(self._model, step))
        try:
            return self.own.begin(step) if self.own.is_pipelined else self.own.forward(step)
        except Exception as error:
            raise self._cut(error) from error

    def choose(
        self, forwarded: "Forwarded | ForwardedPart", rows: Sequence[ChoiceRow]
    ) -> "LaunchedStep | PipelinedStep":
        return (
            PipelinedStep(self, forwarded, rows)
            if isinstance(forwarded, ForwardedPart)
            else self.own.choose(forwarded, rows)
        )

    def finish(self, started: ForwardedPart, rows: Sequence[ChoiceRow]) -> RunResult:
        """Wait until the other stages have computed a step, and choose its tokens. Raises RankLostError."""
        if self._group.size > self._group.num_stages:
            self._group.send(FinishStep(self._model, started.number))
        try:
            return self.own.choose(self.own.finish(started), rows).collect()
        except Exception as error:
            raise self._cut(error) from error

    def _cut(self, error: Exception) -> RankLostError:
        loss = self._group.loss(str(error))
        return RankLostError(f"a step of {self._group.size} ranks was cut: {loss}", loss.was_killed)

    def scrub(self, blocks: Sequence[int]) -> None:
        self._group.send(ScrubBlocks(self._model, tuple(blocks)))
        self.own.scrub(blocks)

    def reset(self) -> None:
        self._group.send(ResetBlocks(self._model))
        self.own.reset()


class PipelinedStep(NamedTuple):
    """A step that is passing through the stages.

    Its `rows` can be fixed before the logits exist, because sequences wait for the step's tokens before they continue.
    """

    runner: RankedRunner
    started: ForwardedPart
    rows: Sequence[ChoiceRow]

    def collect(self) -> RunResult:
        return self.runner.finish(self.started, self.rows)


class RankBlocks(NamedTuple):
    """The numbers of one rank's blocks, buffers for its parts, and the whole blocks in host memory."""

    blocks: Sequence[int]
    places: Sequence[memoryview]
    wholes: Sequence[memoryview]


class RankedCopier:
    """A copier of the blocks of all ranks; in host memory their parts are joined to whole blocks."""

    def __init__(self, own: BlockCopier, model: str, group: RankGroup, parts: BlockParts) -> None:
        self._own = own
        self._model = model
        self._group = group
        self._parts = parts
        self.store_bytes, self.fetch_bytes = own.store_bytes, own.fetch_bytes

    def mark(self) -> object:
        return self._own.mark()

    def store(self, blocks: Sequence[int], into: Sequence[memoryview], mark: object) -> None:
        """Copy all ranks' parts of blocks to host memory.

        Only this rank needs a mark: when a step's results have arrived, all ranks have computed it.
        """
        own, *others = ranks = self._of_ranks(blocks, into)
        self._own.store(own.blocks, own.places, mark)
        self._group.store(self._model, others)
        for rank, one in enumerate(ranks):
            for part, whole in zip(one.places, one.wholes, strict=True):
                self._parts.put(rank // self._group.copies, part, whole)

    def fetch(self, blocks: Sequence[int], source: Sequence[memoryview], mark: object) -> None:
        own, *others = ranks = self._of_ranks(blocks, source)
        for rank, one in enumerate(ranks):
            for part, whole in zip(one.places, one.wholes, strict=True):
                self._parts.take(rank // self._group.copies, whole, part)
        self._group.fetch(self._model, others)
        self._own.fetch(own.blocks, own.places, mark)

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return self._own.map(function, items)

    def _of_ranks(self, blocks: Sequence[int], wholes: Sequence[memoryview]) -> list[RankBlocks]:
        """Return each rank's blocks, with buffers for its parts of them."""
        copies, found = self._group.copies, []
        for rank in range(self._group.size):
            here = [
                (b // copies, whole) for b, whole in zip(blocks, wholes, strict=True) if b % copies == rank % copies
            ]
            places = [memoryview(bytearray(self._parts.part_bytes)) for _ in here]
            found.append(RankBlocks([block for block, _ in here], places, [whole for _, whole in here]))
        return found


def threads_of(config: HostConfig) -> int:
    """Return the number of threads of one rank: as configured, or its share of this machine's cores."""
    if config.threads is not None:
        return config.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, len(config.near_ranks)))


def is_suspended(pid: int) -> bool:
    """True if a process of this machine was stopped by a signal or a debugger, if the system reports that."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in ("T", "t")

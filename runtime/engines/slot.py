"""One model of the site: what is configured, where it is now, who uses it, and what its waking has cost so far.

State and the facts that follow from it; models.py and wakes.py change it. Refuses to know how anything is loaded.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from engine.protocol import ModelInfo, ModelLoad
from runtime.engines.arrivals import Arrivals
from runtime.engines.residency import Standing
from runtime.engines.text import TextSide
from sites.config import ModelConfig
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

Clock = Literal[
    "disk", "host", "swap", "crash"
]  # from the checkpoint, from host memory, somebody else slept for it, its host had died
# What waking is guessed to take before it has been measured: reading at a disk's pace, or mapping what is in memory.
_DISK_BYTES_PER_S, _HOST_BYTES_PER_S, _LEAST_S = 1e9, 8e9, 0.05


class Wake(NamedTuple):
    """One waking, as it is counted."""

    model: str
    clock: Clock
    ms: float
    phases: tuple[tuple[str, float], ...]  # (name, seconds), in order


@dataclass(frozen=True, slots=True)
class LoadedModel:
    config: ModelConfig
    info: ModelInfo
    text: TextSide


@dataclass(slots=True)
class Slot:
    config: ModelConfig
    loaded: LoadedModel | None = None
    info: ModelInfo | None = None  # of the last load: what the model can do stays true while it sleeps
    failure: ApiError | None = None
    failed_at: float = 0.0
    task: "asyncio.Task[None] | None" = None  # a waking under way
    detail: str = ""
    loaded_share: float = 0.0  # of the bytes downloaded or, later, loaded
    wake_ms: float = 0.0  # the last
    wake_ms_from: dict[Literal["disk", "host"], float] = field(default_factory=dict)
    text: TextSide | None = None
    directory: Path | None = None
    num_bytes: int = 0  # of its weights; a guess until an engine has said so
    holds_room: bool = False  # in the device's budget: awake, or about to be
    awake_since: float = 0.0
    used_at: float = 0.0
    is_cut: bool = False  # its host died under it
    is_yielding: bool = False  # takes no new requests: another has waited long for its room
    users: int = 0  # requests that have it
    waiters: int = 0  # requests that have it as soon as it is awake
    queued: int = 0  # these, and those that it does not take yet because it yields
    falling_asleep: "asyncio.Task[None] | None" = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    wakes: int = 0
    evictions: int = 0

    @property
    def is_asleep(self) -> bool:
        return self.loaded is None and self.task is None

    @property
    def is_busy(self) -> bool:
        return self.users > 0 or self.waiters > 0 or self.task is not None

    def residency(self, is_in_host_memory: bool) -> Residency:
        if self.loaded is not None:
            return "device"
        if self.task is not None:
            return "loading"
        if self.failure is not None:
            return "failed"
        return "host" if is_in_host_memory else "disk"

    def expected_wake_s(self, is_in_host_memory: bool) -> float:
        """What waking it takes from where it sleeps: as measured last, else guessed from its size."""
        measured = self.wake_ms_from.get("host" if is_in_host_memory else "disk", 0.0)
        if measured:
            return measured / 1e3
        return _LEAST_S + self.num_bytes / (_HOST_BYTES_PER_S if is_in_host_memory else _DISK_BYTES_PER_S)

    def standing(self, monotonic: float, now: float, is_in_host_memory: bool) -> Standing:
        """Of a model that holds room on the device."""
        return Standing(
            self.config.name,
            self.num_bytes,
            is_pinned=self.config.residency == "device",
            is_busy=self.is_busy,
            priority=self.config.priority,
            awake_for_s=monotonic - self.awake_since,
            wake_s=self.expected_wake_s(is_in_host_memory),
            next_use_s=self.arrivals.expected_in_s(now),
        )

    def standing_in_memory(self, now: float, file_bytes: int) -> Standing:
        """Of a model whose weights lie in host memory: what it is there for is a fast wake."""
        return Standing(
            self.config.name,
            file_bytes,
            is_pinned=self.config.residency == "host",
            is_busy=self.loaded is not None or self.is_busy,
            priority=self.config.priority,
            wake_s=self.expected_wake_s(False),
            next_use_s=self.arrivals.expected_in_s(now),
        )

    def status(self, load: ModelLoad, is_in_host_memory: bool) -> ModelStatus:
        asleep_ms = self.wake_ms_from.get("host" if is_in_host_memory else "disk", self.wake_ms)
        return ModelStatus(
            name=self.config.name,
            aliases=self.config.aliases,
            residency=self.residency(is_in_host_memory),
            loaded=1.0 if self.loaded is not None else self.loaded_share,
            context_length=self.info.context_length if self.info is not None else 0,
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.waiting_tokens,
            kv_blocks_free=load.free_blocks,
            kv_blocks_total=load.total_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_tokens_per_s=load.decode_tokens_per_s,
            wake_ms=self.wake_ms if self.loaded is not None else asleep_ms,
            detail=self.detail,
            weights_bytes=self.num_bytes,
            wakes=self.wakes,
            evictions=self.evictions,
        )

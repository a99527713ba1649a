"""One model of the site: what is configured, who uses it, and what its waking has cost so far. Where it is, its replicas know, one for each device.

State and the facts that follow from it; models.py and wakes.py change it. Refuses to know how anything is loaded.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from engine.protocol import ModelInfo
from runtime.engines.arrivals import Arrivals
from runtime.engines.replica import Replica
from runtime.engines.residency import EvictionCandidate
from runtime.engines.text import TextSide
from sites.site import ModelConfig
from wire.errors import ApiError
from wire.status import ModelStatus, Residency

# From the checkpoint; from host memory; somebody else slept for it; its host had died; a further replica, from the host memory of the first.
Clock = Literal["disk", "host", "swap", "crash", "sibling"]
RETRY_FAILED_S = 10.0  # a load that failed is tried again by a request after so long
# For routers' asking and for models that stay on the device the time doubles with each failure, up to this: what is broken for good must not be
# read, and others put to sleep for it, every ten seconds.
RETRY_FAILED_MAX_S = 300.0
# What waking is guessed to take before it has been measured: reading at a disk's pace, or mapping what is in memory.
_DISK_BYTES_PER_S, _HOST_BYTES_PER_S, _LEAST_S = 1e9, 8e9, 0.05


class Wake(NamedTuple):
    """One waking, as it is counted."""

    model: str
    clock: Clock
    ms: float
    phases: tuple[tuple[str, float], ...]  # (name, seconds), in order


class AwakeModel(NamedTuple):
    config: ModelConfig
    info: ModelInfo
    text: TextSide


class ModelState:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.replicas: tuple[Replica, ...] = ()  # one for each device, wherever it is awake
        self.info: ModelInfo | None = None  # of the last load: what the model can do stays true while it sleeps
        self.failure: ApiError | None = None
        self.failed_at = 0.0
        self.failures = 0  # of its wakes, in a row
        self.detail = ""
        self.loaded_share = 0.0  # of the bytes downloaded or, later, loaded
        self.wake_ms = 0.0  # the last
        self.wake_ms_from: dict[Literal["disk", "host"], float] = {}
        self.text: TextSide | None = None
        self.directory: Path | None = None
        self.num_bytes = 0  # of its weights; a guess until an engine has said so
        self.used_at = 0.0
        self.is_cut = False  # its host died under it
        self.users = 0  # requests that have it
        self.waiters = 0  # requests that have it as soon as it is awake
        self.queued = 0  # these, and those that it does not take yet because it yields
        self.arrivals = Arrivals()
        self.wakes = 0
        self.on_lost: Callable[[], None] = lambda: None  # told when it is on no device any more
        self.evictions = 0

    @property
    def awake(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_awake]

    @property
    def waking(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.task is not None]

    @property
    def loaded(self) -> AwakeModel | None:
        """None unless it is awake somewhere."""
        if self.info is None or self.text is None or not self.awake:
            return None
        return AwakeModel(self.config, self.info, self.text)

    @property
    def flaw(self) -> str | None:
        """Why it takes no conversations although it may be awake; None as far as is known."""
        return self.text.template.why_broken if self.text is not None else None

    @property
    def is_asleep(self) -> bool:
        return not self.awake and not self.waking

    @property
    def is_given_up(self) -> bool:
        """Its last wake failed, too lately for another to be begun by anybody but a request that is here."""
        if self.failure is None:
            return False
        patience_s = min(RETRY_FAILED_MAX_S, RETRY_FAILED_S * 2.0 ** min(self.failures - 1, 10))
        return time.monotonic() - self.failed_at < patience_s

    @property
    def is_busy(self) -> bool:
        return self.users > 0 or self.waiters > 0 or bool(self.waking)

    @property
    def is_yielding(self) -> bool:
        """Nowhere does it take new requests: others have waited long for its room."""
        held = [replica for replica in self.replicas if replica.holds_memory]
        return bool(held) and all(replica.is_yielding for replica in held)

    def residency(self, is_in_host_memory: bool) -> Residency:
        if self.awake:
            return "device"
        if self.waking:
            return "loading"
        if self.is_given_up:
            return "failed"
        return "host" if is_in_host_memory else "disk"

    def expected_wake_s(self, is_in_host_memory: bool) -> float:
        """What waking it takes from where it sleeps: as measured last, else guessed from its size."""
        measured = self.wake_ms_from.get("host" if is_in_host_memory else "disk", 0.0)
        if measured:
            return measured / 1e3
        return _LEAST_S + self.num_bytes / (_HOST_BYTES_PER_S if is_in_host_memory else _DISK_BYTES_PER_S)

    def host_memory_candidate(self, now: float, file_bytes: int) -> EvictionCandidate:
        """Of a model whose weights lie in host memory: what it is there for is a fast wake."""
        return EvictionCandidate(
            self.config.name,
            file_bytes,
            is_pinned=self.config.residency == "host",
            is_busy=bool(self.awake) or self.is_busy,
            priority=self.config.priority,
            wake_s=self.expected_wake_s(False),
            next_use_s=self.arrivals.expected_in_s(now),
        )

    def status(self, is_in_host_memory: bool) -> ModelStatus:
        asleep_ms = self.wake_ms_from.get("host" if is_in_host_memory else "disk", self.wake_ms)
        awake = self.awake
        loads = [replica.load for replica in awake]
        return ModelStatus(
            name=self.config.name,
            aliases=self.config.aliases,
            residency=self.residency(is_in_host_memory),
            loaded=1.0 if awake else self.loaded_share,
            context_length=self.info.context_length if self.info is not None else 0,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued_tokens=min((load.waiting_tokens for load in loads), default=0),
            kv_blocks_free=sum(load.free_blocks for load in loads),
            kv_blocks_total=sum(load.total_blocks for load in loads),
            prefill_tokens_per_s=_mean([load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s]),
            decode_tokens_per_s=_mean([load.decode_tokens_per_s for load in loads if load.decode_tokens_per_s]),
            wake_ms=self.wake_ms if awake else asleep_ms,
            detail=self.detail or self.flaw or "",
            weights_bytes=self.num_bytes,
            wakes=self.wakes,
            evictions=self.evictions,
            copies=len(awake),
            in_host_memory=is_in_host_memory,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""The state of one of the site's models: configuration, facts, demand, and a replica for each device.

registry.py, wakes.py, device_budget.py and dispatcher.py change it. Independent of how weights are loaded.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.client import EngineClient
from pilotlight.engine.api.protocol import ModelInfo, ModelLoad
from pilotlight.runtime.dispatch.prefixes import PrefixMemory
from pilotlight.runtime.hosts.device_host import HostHandle
from pilotlight.runtime.models.demand import Demand
from pilotlight.runtime.models.residency import SPARE, EvictionCandidate
from pilotlight.runtime.models.text import TextSide
from pilotlight.runtime.models.wake_history import WakeHistory
from pilotlight.runtime.models.weights_tier import WeightsTier
from pilotlight.sites.site import ModelConfig
from pilotlight.wire.errors import ApiError
from pilotlight.wire.hop.status import ModelStatus, Residency


class AwakeModel(NamedTuple):
    config: ModelConfig
    info: ModelInfo
    text: TextSide


class OpenWork:
    """The open sequences of a replica, and an estimate of the tokens still to be computed for them."""

    def __init__(self) -> None:
        self.sequences = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0


class Replica:
    """A model on one device, with its open sequences. It is asleep, waking, awake or falling asleep."""

    def __init__(self, model: str, host: HostHandle) -> None:
        self.model = model
        self.host = host
        self.is_awake = False
        self.loaded_by: EngineClient | None = None  # client of the host that loaded the weights last
        self.task: asyncio.Task[None] | None = None  # the wake in progress
        self.falling_asleep: asyncio.Task[None] | None = None
        self.holds_memory = False  # it uses memory of the device's budget: awake, or about to be
        self.awake_since = 0.0
        self.is_yielding = False  # takes no new sequences, because another model waits for its memory
        self.is_retiring = False  # takes no new sequences, because the other replicas suffice
        self.late_at = 0.0  # time at which another host stopped waiting for a prompt that this one had to compute
        self.work = OpenWork()
        self.prefixes = PrefixMemory()

    def start_waking(self, wake: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine of a wake as the replica's task. It must call `end_waking` last."""
        self.task = asyncio.create_task(wake, name=f"wake {self.model}")

    def end_waking(self) -> None:
        self.task = None

    def note_loaded(self, client: EngineClient) -> None:
        self.loaded_by = client

    def start_unloading(self, unload: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run the coroutine of an unloading; the next wake waits for it. It must call `end_unloading` last."""
        self.falling_asleep = asyncio.create_task(unload, name=f"unload {self.model}")
        return self.falling_asleep

    def end_unloading(self) -> None:
        self.falling_asleep = None

    @property
    def is_live(self) -> bool:
        """Tell whether the model is awake here and its host responds."""
        return self.is_awake and self.host.why_down is None

    @property
    def takes_prompts(self) -> bool:
        """Tell whether this replica can compute prompts for other hosts.
        Its host must have an address for blocks, and must have responded since it was last late."""
        client = self.host.client
        return self.host.peer_address is not None and client is not None and client.last_event_at >= self.late_at

    @property
    def is_changing(self) -> bool:
        return self.task is not None or self.falling_asleep is not None

    @property
    def load(self) -> ModelLoad:
        return self.host.loads.get(self.model, ModelLoad())

    def forget(self) -> None:
        """Record that the weights and cached blocks are no longer on the device."""
        self.is_awake = self.is_retiring = False
        self.prefixes.forget()


class ModelStates(dict[str, "ModelState"]):
    """The models of a site by their names.

    The lookup of a name that was removed while a request was in progress raises ApiError."""

    def __missing__(self, name: str) -> "ModelState":
        raise no_model(name)


def no_model(name: str) -> ApiError:
    return ApiError("model_not_found", f"this site has no model named {name[:200]!r}", param="model")


class ModelState:
    def __init__(
        self,
        config: ModelConfig,
        hosts: Sequence[HostHandle],
        tier: WeightsTier | None = None,
        on_lost: Callable[[str], None] = lambda model: None,
        *,
        is_added: bool = False,
    ) -> None:
        """Track one model.

        `tier` holds weights in host memory, if the site has such a tier. `on_lost` is called when the model leaves its last device. `is_added` is
        True if an operator added it at run time.
        """
        self.config = config
        self.is_added = is_added
        self.replicas = tuple(Replica(config.name, host) for host in hosts)
        self.info: ModelInfo | None = None  # facts found by the last load; stays valid while the model sleeps
        self.text: TextSide | None = None
        self.directory: Path | None = None
        self.num_bytes = 0  # size of the weights; an estimate until an engine reports it
        self.detail = ""  # description of the current operation
        self.loaded_share = 0.0  # share of the bytes that are downloaded or, later, loaded
        self.history = WakeHistory()
        self.demand = Demand()
        self._tier = tier
        self._on_lost = on_lost

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def awake(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.is_awake]

    @property
    def loads(self) -> list[ModelLoad]:
        """The load of the awake replicas, as far as hosts have reported it."""
        return [load for replica in self.awake if (load := replica.host.loads.get(self.name)) is not None]

    @property
    def waking(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.task is not None]

    @property
    def loaded(self) -> AwakeModel | None:
        """The loaded model; None unless it is awake on a device."""
        if self.info is None or self.text is None or not self.awake:
            return None
        return AwakeModel(self.config, self.info, self.text)

    @property
    def flaw(self) -> str | None:
        """The reason why the model refuses conversations even when awake; None if none is known."""
        return self.text.rendering.why_broken if self.text is not None else None

    @property
    def is_asleep(self) -> bool:
        return not self.awake and not self.waking

    @property
    def is_busy(self) -> bool:
        return self.demand.is_open or bool(self.waking)

    @property
    def is_yielding(self) -> bool:
        """Tell whether the model takes no new requests, because other models have waited long for its memory."""
        held = [replica for replica in self.replicas if replica.holds_memory]
        return bool(held) and all(replica.is_yielding for replica in held)

    def note_files(self, directory: Path) -> None:
        self.directory = directory

    def note_text(self, text: TextSide) -> None:
        self.text = text

    def note_info(self, info: ModelInfo) -> bool:
        """Store the facts that a load has found; return whether it was the first load."""
        is_first, self.info = self.info is None, info
        return is_first

    def has_others_awake(self, replica: Replica) -> bool:
        return any(other.is_awake for other in self.replicas if other is not replica)

    def is_spare(self, replica: Replica) -> bool:
        """Return whether the model is awake on this device and on another one."""
        return replica.is_awake and self.has_others_awake(replica)

    def is_replica_busy(self, replica: Replica) -> bool:
        is_needed = self.is_busy and not self.is_spare(replica)
        return replica.work.sequences > 0 or replica.is_changing or is_needed

    def lose(self, replica: Replica) -> None:
        """Record that the model's weights are no longer on that device."""
        replica.forget()
        if not self.awake:
            self._on_lost(self.name)

    @property
    def is_in_host_memory(self) -> bool:
        return self._tier is not None and self._tier.bytes_of(self.name) > 0

    @property
    def residency(self) -> Residency:
        if self.awake:
            return "device"
        if self.waking:
            return "loading"
        if self.history.is_given_up:
            return "failed"
        return "host" if self.is_in_host_memory else "disk"

    @property
    def expected_wake_s(self) -> float:
        return self.history.expected_s(self.is_in_host_memory, self.num_bytes)

    def device_candidate(self, replica: Replica, monotonic: float, now: float) -> EvictionCandidate:
        """Describe a replica that holds memory of its device, for the choice of an eviction.

        An extra replica is evicted before another model's only one.
        """
        is_spare = self.is_spare(replica)
        return EvictionCandidate(
            self.name,
            self.num_bytes,
            is_pinned=self.config.residency == "device" and not is_spare,
            is_busy=self.is_replica_busy(replica),
            priority=SPARE if is_spare else self.config.priority,
            awake_for_s=monotonic - replica.awake_since,
            wake_s=self.expected_wake_s,
            next_use_s=self.demand.arrivals.expected_in_s(now),
        )

    def host_memory_candidate(self, now: float, file_bytes: int) -> EvictionCandidate:
        """Describe a model whose weights are in host memory, for the choice of an eviction."""
        return EvictionCandidate(
            self.name,
            file_bytes,
            is_pinned=self.config.residency == "host",
            is_busy=bool(self.awake) or self.is_busy,
            priority=self.config.priority,
            wake_s=self.history.expected_s(False, self.num_bytes),
            next_use_s=self.demand.arrivals.expected_in_s(now),
        )

    def status(self) -> ModelStatus:
        history, is_in_host_memory = self.history, self.is_in_host_memory
        asleep_ms = history.last_ms_from.get("host" if is_in_host_memory else "disk", history.last_ms)
        awake = self.awake
        loads = [replica.load for replica in awake]
        return ModelStatus(
            name=self.name,
            aliases=self.config.aliases,
            residency=self.residency,
            loaded=1.0 if awake else self.loaded_share,
            context_length=self.info.context_length if self.info is not None else 0,
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued_tokens=min((load.waiting_tokens for load in loads), default=0),
            kv_blocks_free=sum(load.free_blocks for load in loads),
            kv_blocks_total=sum(load.total_blocks for load in loads),
            prefill_tokens_per_s=_mean([load.prefill_tokens_per_s for load in loads if load.prefill_tokens_per_s]),
            decode_tokens_per_s=_mean([load.decode_tokens_per_s for load in loads if load.decode_tokens_per_s]),
            kv_store=next((load.store for load in loads if load.store), ""),
            kv_store_tokens_per_s=_mean([load.store_tokens_per_s for load in loads if load.store_tokens_per_s]),
            wake_ms=history.last_ms if awake else asleep_ms,
            detail=self.detail or self.flaw or "",
            weights_bytes=self.num_bytes,
            wakes=history.wakes,
            evictions=history.evictions,
            copies=len(awake),
            in_host_memory=is_in_host_memory,
            is_added=self.is_added,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0

"""One model on one device: asleep there, waking, awake, falling asleep; and the sequences that are open on it.

State and the facts that follow from it; wakes.py, room.py and dispatch.py change it. What is true of the model wherever it is, state.py knows.
"""

import asyncio
from typing import TYPE_CHECKING

from engine.client import EngineClient
from engine.protocol import ModelLoad
from runtime.engines.device_host import DeviceHost
from runtime.engines.prefixes import PrefixMemory
from runtime.engines.residency import SPARE, EvictionCandidate

if TYPE_CHECKING:
    from runtime.engines.model_state import ModelState


class OpenWork:
    """What is open on a replica: sequences, and the tokens that are still to be computed for them, as far as one can tell."""

    def __init__(self) -> None:
        self.sequences = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0


class Replica:
    def __init__(self, state: "ModelState", host: DeviceHost) -> None:
        self.state = state
        self.host = host
        self.is_awake = False
        self.loaded_by: EngineClient | None = None  # the host that has, or had, its weights
        self.task: asyncio.Task[None] | None = None  # a waking under way
        self.falling_asleep: asyncio.Task[None] | None = None
        self.holds_memory = False  # in the device's budget: awake, or about to be
        self.awake_since = 0.0
        self.is_yielding = False  # takes no new sequences: another model has waited long for its room
        self.is_retiring = False  # takes no new sequences: the others do without it
        self.work = OpenWork()
        self.prefixes = PrefixMemory()

    @property
    def is_live(self) -> bool:
        """Awake, and its host answers."""
        return self.is_awake and self.host.why_down is None

    @property
    def is_spare(self) -> bool:
        """The model is awake elsewhere as well."""
        return self.is_awake and any(replica.is_awake for replica in self.state.replicas if replica is not self)

    @property
    def is_busy(self) -> bool:
        is_changing = self.task is not None or self.falling_asleep is not None
        return self.work.sequences > 0 or is_changing or (self.state.is_busy and not self.is_spare)

    @property
    def load(self) -> ModelLoad:
        return self.host.loads.get(self.state.config.name, ModelLoad())

    @property
    def has_load(self) -> bool:
        """Its host has said how busy it is."""
        return self.state.config.name in self.host.loads

    def lose(self) -> None:
        """Its weights are no longer on the device, nor is what it had computed."""
        self.is_awake = self.is_retiring = False
        self.prefixes.forget()
        if not self.state.awake:
            self.state.on_lost()

    def candidate(self, monotonic: float, now: float, is_in_host_memory: bool) -> EvictionCandidate:
        """Of a replica that holds room on its device. One that the model could do without gives way before anybody's only one."""
        state, is_spare = self.state, self.is_spare
        return EvictionCandidate(
            state.config.name,
            state.num_bytes,
            is_pinned=state.config.residency == "device" and not is_spare,
            is_busy=self.is_busy,
            priority=SPARE if is_spare else state.config.priority,
            awake_for_s=monotonic - self.awake_since,
            wake_s=state.expected_wake_s(is_in_host_memory),
            next_use_s=state.arrivals.expected_in_s(now),
        )

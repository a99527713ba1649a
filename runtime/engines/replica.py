"""One model on one device: asleep there, waking, awake, falling asleep; and the sequences that are open on it.

State and the facts that follow from it; wakes.py, device_budget.py and dispatch.py change it. model_state.py knows what is true of the model
wherever it is.
"""

import asyncio

from engine.client import EngineClient
from engine.protocol import ModelLoad
from runtime.engines.device_host import DeviceHost
from runtime.engines.prefixes import PrefixMemory


class OpenWork:
    """Sequences that are open on a replica, and the tokens that are still to be computed for them, as far as one can tell."""

    def __init__(self) -> None:
        self.sequences = 0
        self.prefill_tokens = 0
        self.decode_tokens = 0


class Replica:
    def __init__(self, model: str, host: DeviceHost) -> None:
        self.model = model
        self.host = host
        self.is_awake = False
        self.loaded_by: EngineClient | None = None  # the host that has, or had, its weights
        self.task: asyncio.Task[None] | None = None  # a waking under way
        self.falling_asleep: asyncio.Task[None] | None = None
        self.holds_memory = False  # of the device's budget: awake, or about to be
        self.awake_since = 0.0
        self.is_yielding = False  # takes no new sequences: another model has waited long for its memory
        self.is_retiring = False  # takes no new sequences: the others do without it
        self.work = OpenWork()
        self.prefixes = PrefixMemory()

    @property
    def is_live(self) -> bool:
        """Whether it is awake, and its host answers."""
        return self.is_awake and self.host.why_down is None

    @property
    def is_changing(self) -> bool:
        return self.task is not None or self.falling_asleep is not None

    @property
    def load(self) -> ModelLoad:
        return self.host.loads.get(self.model, ModelLoad())

    @property
    def has_load(self) -> bool:
        """Whether its host has said how busy it is."""
        return self.model in self.host.loads

    def forget(self) -> None:
        """Note that its weights are no longer on the device, nor what it had computed."""
        self.is_awake = self.is_retiring = False
        self.prefixes.forget()

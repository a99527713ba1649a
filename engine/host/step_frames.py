"""The frame that a host sends after each step: new tokens, every model's load, the step's times.

It sends a heartbeat while nothing is computed. This module is independent of commands and loads.
"""

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import HostPhases, StepOutput, TokenOutput
from pilotlight.engine.host.transport import HostTransport

if TYPE_CHECKING:
    from pilotlight.engine.loading.loaded_model import LoadedModel

HEARTBEAT_S = 0.5


class StepFrames:
    def __init__(self, transport: HostTransport) -> None:
        self._transport = transport
        # outputs of sequences that never reached an engine, or whose model was unloaded
        self._outputs: list[TokenOutput] = []
        self._num_steps = 0
        self._last_frame_at = time.monotonic()

    def add(self, *outputs: TokenOutput) -> None:
        """Add outputs to the next frame."""
        self._outputs += outputs

    def note_progress(self) -> None:
        """Count progress that is not a step, for the front end that watches this host."""
        self._num_steps += 1

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    @property
    def until_heartbeat_s(self) -> float:
        return self._last_frame_at + HEARTBEAT_S - time.monotonic()

    def send(self, models: "Collection[LoadedModel]", stepped: "Sequence[LoadedModel]") -> None:
        """Send a frame. `stepped`: the models that have computed something."""
        started = time.perf_counter()
        outputs, self._outputs = self._outputs, []
        for model in models:
            outputs += model.engine.sequences.take_outputs()
        self._num_steps += bool(stepped)
        times = [model.engine.stats.last_step for model in stepped]
        loads = {model.spec.name: model.engine.load() for model in models}
        device_s = sum(t.device_s for t in times)
        phases = HostPhases(
            schedule_ms=1000 * sum(t.schedule_s for t in times),
            prepare_ms=1000 * sum(t.prepare_s for t in times),
            publish_ms=1000 * (sum(t.publish_s for t in times) + time.perf_counter() - started),
        )
        self._transport.send(
            StepOutput(self._num_steps, tuple(outputs), loads, phases.total_ms, device_s * 1000, phases)
        )
        self._last_frame_at = time.monotonic()

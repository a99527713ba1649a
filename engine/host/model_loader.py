"""The thread that loads models while a host keeps serving its loaded ones.

Loads one model at a time, in order, because the disk is the bottleneck. Imports torch in its thread, so that the host is reachable and sends
heartbeats meanwhile.
"""

import gc
import logging
import os
import queue
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import VERSION, HostConfig, HostReady, LoadProgress, ModelFailed, ModelSpec
from pilotlight.engine.api.validation import host_problem
from pilotlight.engine.host.preparation import prepare
from pilotlight.engine.host.process import at_low_priority
from pilotlight.engine.weights.digests import check_sound, verify_in_background

if TYPE_CHECKING:
    from pilotlight.engine.kv.shared_tiers import SharedTiers
    from pilotlight.engine.loading.kv_memory import KvMemory
    from pilotlight.engine.loading.loaded_model import LoadedModel

    LoadResult = LoadProgress | LoadedModel | ModelFailed

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.05
_LAST_LOAD_S = 1.0
_LOOK_S = 0.5


class ModelLoader:
    def __init__(self, config: HostConfig, is_standby: bool = False, digests: Path | None = None) -> None:
        """Prepare the thread.

        `is_standby`: no request waits for this host; it prepares more thoroughly, at a lower priority. `digests`: the folder of the digests that
        each checkpoint had at its first load; later loads are checked against them.
        """
        if problem := host_problem(config):
            raise ValueError(problem)
        self._config = config
        self._is_standby = is_standby
        self._digests = digests
        self.ready: HostReady | None = None  # None until models can be loaded
        self.why_ending: str | None = None  # why the loader ends the host, if it does
        self._specs: queue.SimpleQueue[ModelSpec | None] = queue.SimpleQueue()
        self._expected: queue.SimpleQueue[ModelSpec] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[ModelSpec, LoadResult]] = queue.SimpleQueue()
        self._memory: KvMemory | None = None
        self._tiers: SharedTiers | None = None
        self._has_prewarmed = False
        self.has_started = False
        self._thread = threading.Thread(target=self._run, name="model-loader", daemon=True)

    def start(self) -> None:
        """Start to import torch. Calling it twice is harmless."""
        if not self.has_started:
            self.has_started = True
            self._thread.start()

    def load(self, spec: ModelSpec) -> None:
        self._specs.put(spec)

    def prewarm(self, spec: ModelSpec) -> None:
        self._expected.put(spec)

    def take_results(self) -> "list[tuple[ModelSpec, LoadResult]]":
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """End the other ranks, wait at most _LAST_LOAD_S for a running load, and close the tiers."""
        if self._memory is not None:
            self._memory.close()
        self._specs.put(None)
        if self.has_started:
            self._thread.join(_LAST_LOAD_S)
        if self._tiers is not None:
            self._tiers.close()

    def _end_host(self, why: str) -> None:
        self.why_ending = why
        os.kill(os.getpid(), signal.SIGTERM)

    def _run(self) -> None:
        try:
            self.ready = prepare(self._config, self._is_standby, import_libraries)
        except Exception:  # the same error occurs, and is reported, when a model is loaded
            log.exception("this host cannot be made ready")
            self.ready = HostReady(VERSION)
        while (spec := self._next()) is not None:
            self._results.put((spec, self._try_to_load(spec)))

    def _next(self) -> ModelSpec | None:
        """Wait for a model to load; meanwhile prewarm expected models and unmap removed files.

        The removed files contained weights of sleeping models; the site removes them.
        """
        while True:
            try:
                return self._specs.get(timeout=0.0 if self._expected.qsize() else _LOOK_S)
            except queue.Empty:
                if self._expected.qsize():
                    self._prewarm(self._expected.get())
                elif self._memory is not None or self._has_prewarmed:
                    from pilotlight.engine.weights.bundles.bundle_maps import MAPS

                    MAPS.drop_removed_maps()

    def _prewarm(self, spec: ModelSpec) -> None:
        from pilotlight.engine.host.prewarming import prewarm

        self._has_prewarmed = True
        try:
            at_low_priority(lambda: prewarm(spec, self._config))
        except Exception as error:  # after any error the load itself is only slower, or reports the error
            log.info("%s is not prewarmed: %s: %s", spec.name, type(error).__name__, error)

    def _try_to_load(self, spec: ModelSpec) -> "LoadedModel | ModelFailed":
        try:
            return self._load(spec)
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # any error, such as of a full device or broken disk, fails only this load
            log.exception("loading %s failed", spec.name)
            reason = f"{type(error).__name__}: {error}"
        return ModelFailed(spec.name, "model_load_failed", f"{spec.name} cannot be loaded: {reason}")

    def _load(self, spec: ModelSpec) -> "LoadedModel":
        from pilotlight.engine.kv.shared_tiers import open_tiers
        from pilotlight.engine.loading.kv_memory import make_kv_memory
        from pilotlight.engine.loading.loading import load_model

        if self._memory is None:
            # When a rank is lost, _end_host ends this host, and open sequences move to the next one.
            self._memory = make_kv_memory(
                self._config,
                self._end_host,
                spec,
                lambda why: self._results.put((spec, LoadProgress(spec.name, 0, 0, why))),
            )
            self._tiers = open_tiers(self._config)
        reported_at = 0.0

        def report(done: int, total: int) -> None:
            nonlocal reported_at
            now = time.monotonic()
            if done == total or now - reported_at >= _PROGRESS_INTERVAL_S:
                reported_at = now
                self._results.put((spec, LoadProgress(spec.name, done, total)))

        directory = Path(spec.path)
        if self._digests is not None:
            check_sound(directory, self._digests)
        loaded = load_model(spec, self._config, self._memory, report, self._tiers)
        if self._digests is not None:
            # If the weights are damaged, the host stops as on request: open sequences move to another host, and check_sound refuses later loads.
            verify_in_background(directory, self._digests, lambda: os.kill(os.getpid(), signal.SIGTERM))
        return loaded


def import_libraries() -> None:
    """Import the modules that every host needs, with any configuration.

    The garbage collector is off meanwhile: modules are never garbage, and its scans take an eighth of the time. Then the modules are frozen, because
    a later scan of them would pause two steps for 50 ms.
    """
    gc.disable()
    try:
        import pilotlight.engine.loading.loading
        import pilotlight.kernels.cpu.library  # noqa: F401

        gc.freeze()
    finally:
        gc.enable()

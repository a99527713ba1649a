"""The thread that loads models while a host keeps serving those it has.

Knows one load at a time, in order, because the disk is the bottleneck. Imports torch in its thread: a host is
reachable, and its heart beats, before.
"""

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

from engine.errors import CheckpointError
from engine.protocol import HostConfig, LoadProgress, ModelFailed, ModelSpec

if TYPE_CHECKING:
    from engine.kv.arena import Arena
    from engine.loading import LoadedModel

    LoadResult = LoadProgress | LoadedModel | ModelFailed

log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 0.05
_LAST_LOAD_S = 1.0


class ModelLoader:
    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._specs: queue.SimpleQueue[tuple[ModelSpec, int] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[ModelSpec, LoadResult]] = queue.SimpleQueue()
        self._arena: Arena | None = None
        self._thread = threading.Thread(target=self._run, name="model-loader", daemon=True)
        self._thread.start()

    def load(self, spec: ModelSpec, num_sharing: int) -> None:
        self._specs.put((spec, num_sharing))

    def release(self, model: "LoadedModel") -> None:
        """The model is no longer used: its KV slab may be borrowed again."""
        assert self._arena is not None, "a model was loaded without an arena"
        if model.slab is not None:
            self._arena.give_back(model.slab)

    def take_results(self) -> "list[tuple[ModelSpec, LoadResult]]":
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def close(self) -> None:
        """Lets the load under way, if any, end first: a thread that is inside torch when the interpreter ends aborts the process."""
        self._specs.put(None)
        self._thread.join(_LAST_LOAD_S)

    def _run(self) -> None:
        try:
            import engine.loading  # noqa: F401  (torch, while nobody waits for a model yet)
        except Exception:  # the same import fails again, and is reported, when a model is loaded
            log.exception("torch cannot be imported")
        while (job := self._specs.get()) is not None:
            spec, num_sharing = job
            self._results.put((spec, self._try_to_load(spec, num_sharing)))

    def _try_to_load(self, spec: ModelSpec, num_sharing: int) -> "LoadedModel | ModelFailed":
        try:
            return self._load(spec, num_sharing)
        except CheckpointError as error:
            reason = str(error)
        except Exception as error:  # whatever a full device or a broken disk raises is the answer to this load alone
            log.exception("loading %s failed", spec.name)
            reason = f"{type(error).__name__}: {error}"
        return ModelFailed(spec.name, "model_load_failed", f"{spec.name} cannot be loaded: {reason}")

    def _load(self, spec: ModelSpec, num_sharing: int) -> "LoadedModel":
        from engine.loading import load_model, make_arena

        if self._arena is None:
            self._arena = make_arena(self._config)
        reported_at = 0.0

        def report(done: int, total: int) -> None:
            nonlocal reported_at
            now = time.monotonic()
            if done == total or now - reported_at >= _PROGRESS_INTERVAL_S:
                reported_at = now
                self._results.put((spec, LoadProgress(spec.name, done, total)))

        return load_model(spec, self._config, self._arena, num_sharing, report)

"""The models of an engine host, both loaded and loading.

This module decides which results of the loader are still needed. It is independent of sequences and steps.
"""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import LoadProgress, ModelFailed, ModelReady, ModelSpec, ModelUnloaded
from pilotlight.engine.host.step_frames import StepFrames
from pilotlight.engine.host.transport import HostTransport

if TYPE_CHECKING:
    from pilotlight.engine.loading.loaded_model import LoadedModel

    LoadResult = LoadProgress | LoadedModel | ModelFailed


class HostedModels:
    def __init__(self, start_load: Callable[[ModelSpec], None], transport: HostTransport, frames: StepFrames) -> None:
        """Prepare to serve. `start_load`: starts a load, whose results are passed to `collect` later."""
        self._start_load = start_load
        self._transport = transport
        self._frames = frames
        self.served: dict[str, LoadedModel] = {}  # by name
        self.loading: dict[str, ModelSpec] = {}  # by name
        self._arriving: list[LoadedModel] = []  # loaded, but part of their cache is still held by other models

    def why_missing(self, name: str) -> str:
        state = "is still loading" if name in self.loading else "is not loaded"
        return f"model {name!r} {state}; loaded are: {', '.join(sorted(self.served)) or 'none'}"

    def load(self, spec: ModelSpec) -> None:
        served = self.served.get(spec.name)
        known = served.spec if served else self.loading.get(spec.name)
        if known is None:
            self.loading[spec.name] = spec
            self._start_load(spec)
        elif not known.loads_same(spec):
            message = f"{spec.name} is already loaded from {known.path}; unload it first"
            self._transport.send(ModelFailed(spec.name, "model_load_failed", message))
        elif served:
            self._transport.send(ModelReady(served.engine.info))

    def unload(self, name: str) -> None:
        self.loading.pop(name, None)  # its result will be dropped
        model = self.served.pop(name, None)
        if model is not None:
            model.engine.sequences.end_all("model_not_found", f"model {name!r} was unloaded")
            self._frames.add(*model.engine.sequences.take_outputs())
            model.close()
        self._transport.send(ModelUnloaded(name))

    def collect(self, results: "Iterable[tuple[ModelSpec, LoadResult]]") -> None:
        """Handle results of loads, and serve loaded models whose cache is free."""
        for spec, result in results:
            is_wanted = self.loading.get(spec.name) is spec  # otherwise it was unloaded while it loaded
            match result:
                case ModelFailed() if is_wanted:
                    del self.loading[spec.name]
                    self._transport.send(result)
                case LoadProgress() if is_wanted:
                    self._transport.send(result)
                case LoadProgress() | ModelFailed():
                    pass
                case loaded:
                    self._arriving.append(loaded)
        self._arriving = [loaded for loaded in self._arriving if not self._activate(loaded)]

    def close(self) -> None:
        for model in (*self.served.values(), *self._arriving):
            model.close()

    def _activate(self, loaded: "LoadedModel") -> bool:
        """Serve a loaded model, or close it if it was unloaded meanwhile.

        Returns False while its part of the arena is not free.
        """
        name = loaded.spec.name
        if self.loading.get(name) is not loaded.spec:
            loaded.close()
        elif loaded.has_whole_cache():
            del self.loading[name]
            self.served[name] = loaded
            self._transport.send(ModelReady(loaded.engine.info))
        else:
            return False
        return True

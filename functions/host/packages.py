"""The import path of a function: its layers, and the layer of its dependencies once installed."""

import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from pilotlight.functions.host.dependencies.layers import LayerError
from pilotlight.functions.host.faults import Fault
from pilotlight.functions.manifest import Manifest

REFUSED_FOR_S = 20.0  # pause before packages that could not be installed are tried again


class Packages:
    def __init__(
        self,
        manifest: Manifest,
        layers: tuple[Path, ...],
        install: Callable[[], Awaitable[Path | None]] | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`layers` exist already.

        `install` returns the layer of the function's dependencies, or None if the function has none. Without `install`, nothing is done before
        the function runs.
        """
        vendored = manifest.directory / "python_modules"
        self.layers = [str(path.resolve()) for path in (*layers, *((vendored,) if vendored.is_dir() else ()))]
        self._function = manifest.name
        self._install = install
        self._clock = clock
        self._refused: tuple[float, Fault] | None = None

    async def install(self) -> None:
        """Install missing packages. Raises Fault."""
        if self._install is None:
            return
        now = self._clock()
        if self._refused is not None and now < self._refused[0]:
            raise self._refused[1]
        try:
            layer = await self._install()
        except LayerError as error:
            sentence = f"the packages of {self._function!r} cannot be installed"
            fault = Fault(sentence, code="dependencies", name="LayerError", detail=f"{sentence}:\n{error}")
            self._refused = now + REFUSED_FOR_S, fault
            raise fault from None
        if self._install is not None:  # false if a concurrent request has installed them
            self._install = None
            if layer is not None:
                self.layers.insert(0, str(layer.resolve()))

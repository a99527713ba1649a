"""The Python that runs a function: the site's own, or another one that `requires-python` demands.

Another Python has its own zygote, and msgspec is installed for it as a layer. If none fits, a warning is logged and the site's own Python is used.
"""

import asyncio
import logging
from pathlib import Path

from pilotlight.functions.host.dependencies.layers import Layers
from pilotlight.functions.host.dependencies.python_versions import (
    MINORS,
    OWN,
    Interpreter,
    best,
    installed,
    requires_python,
)
from pilotlight.functions.sandbox.confinement.confinement import Confinement
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import FunctionZygote

log = logging.getLogger("pilotlight.function")

NEEDED = ("msgspec>=0.19",)  # packages that a zygote needs


class InterpreterZygote:
    """The zygote factory for functions that need another Python than the site's."""

    def __init__(self, python: Interpreter, site: SiteZygote, layers: Layers) -> None:
        self._wanted = python
        self._site = site
        self._layers = layers
        self._zygote: SiteZygote | None = None
        self._has_failed = False
        self._starting = asyncio.Lock()

    @property
    def python(self) -> Interpreter:
        return OWN if self._has_failed else self._wanted

    async def start(self) -> Interpreter:
        """Start the zygote once; return the Python for functions.
        It is the site's own if the other Python cannot be used."""
        async with self._starting:
            if self._zygote is None and not self._has_failed:
                try:
                    libraries = await self._layers.get(NEEDED, self._wanted)
                    self._zygote = SiteZygote(self._wanted.path, libraries)
                    self._zygote.start()
                except Exception as error:  # another Python's installer may raise anything
                    self._has_failed = True
                    log.warning(
                        "Python %s cannot be used: %s; the site's own runs instead", self._wanted.version, error
                    )
        return self.python

    def create_zygote(self, limits: Confinement, imports: list[str], log_fd: int) -> FunctionZygote:
        return (self._zygote or self._site).create_zygote(limits, imports, log_fd)

    def stop(self) -> None:
        if self._zygote is not None:
            self._zygote.stop()


class Interpreters:
    """The Pythons that a site can use."""

    def __init__(self, site: SiteZygote, layers: Layers) -> None:
        self._site = site
        self._layers = layers
        self._zygotes: dict[str, InterpreterZygote] = {}

    def wanted_by(self, function: str, folder: Path) -> InterpreterZygote | None:
        """Return the zygote factory for the Python that a function demands; None for the site's own Python."""
        wanted = requires_python(folder)
        if not wanted or OWN.version in wanted:
            return None
        python = best(wanted, installed())
        if python is None:
            minors = ", ".join(f"3.{minor}" for minor in MINORS)
            log.warning(
                "%s requires Python %s, which is not installed here (searched: %s on the path, in pyenv and in uv); it runs on the site's own %s",
                function, wanted, minors, OWN.version,
            )  # fmt: skip
            return None
        if python.path not in self._zygotes:
            self._zygotes[python.path] = InterpreterZygote(python, self._site, self._layers)
        return self._zygotes[python.path]

    def stop(self) -> None:
        for zygote in self._zygotes.values():
            zygote.stop()

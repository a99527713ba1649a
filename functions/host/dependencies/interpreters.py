"""The Python that runs a function: the site's own, or another one that `requires-python` demands.

Candidates are `python3.N` on the path, and the Pythons of pyenv and uv. Another Python has its own zygote, and msgspec is installed for it as a
layer. If none fits, a warning is logged and the site's own Python is used.
"""

import asyncio
import logging
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from pilotlight.functions.manifest import ManifestError, read_toml
from pilotlight.functions.sandbox.confinement.tiers import Confinement
from pilotlight.functions.sandbox.zygotes.site_zygote import SiteZygote
from pilotlight.functions.sandbox.zygotes.zygote_client import FunctionZygote

log = logging.getLogger("pilotlight.function")

MINORS = (11, 12, 13, 14)  # supported minor versions of Python 3
NEEDED = ("msgspec>=0.19",)  # packages that a zygote needs


class Interpreter(NamedTuple):
    path: str
    version: str

    @property
    def tag(self) -> str:
        """Return the tag in the file names of compiled packages, such as cpython-312."""
        major, minor = self.version.split(".")[:2]
        return f"cpython-{major}{minor}"


OWN = Interpreter(sys.executable, platform.python_version())


class Installer(Protocol):
    """Installs packages for an interpreter; implemented in layers.py."""

    async def get(self, requirements: tuple[str, ...], python: Interpreter) -> Path:
        """Install the requirements if needed; return the directory with the packages. Raises LayerError."""


class InterpreterZygote:
    """The zygote factory for functions that need another Python than the site's."""

    def __init__(self, python: Interpreter, site: SiteZygote, layers: Installer) -> None:
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

    def __init__(self, site: SiteZygote, layers: Installer) -> None:
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


def requires_python(folder: Path) -> SpecifierSet | None:
    """Return `project.requires-python`; None if it is missing or invalid."""
    try:
        project = read_toml(folder / "pyproject.toml").get("project", {})
        return SpecifierSet(str(project["requires-python"]))
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, InvalidSpecifier, ManifestError):
        return None


def best(wanted: SpecifierSet, found: Iterable[Interpreter]) -> Interpreter | None:
    """Return the lowest matching minor version in its newest release; most packages have wheels for it."""
    fitting = [each for each in found if each.version in wanted]
    return min(fitting, key=lambda each: (Version(each.version).minor, -Version(each.version).micro), default=None)


def installed() -> Iterator[Interpreter]:
    """List the installed interpreters by their file names; nothing is run."""
    for minor in MINORS:
        found = shutil.which(f"python3.{minor}")
        if found is not None and "pyenv/shims" not in found and os.access(found, os.X_OK):
            yield Interpreter(os.path.realpath(found), f"3.{minor}.0")
    home = Path.home()
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    for folder in (*_folders(pyenv), *_folders(uv)):
        version = re.match(r"(?:cpython-)?(3\.(\d+)\.\d+)(?:-|\Z)", folder.name)
        path = folder / "bin" / "python3"
        if version is not None and int(version[2]) in MINORS and path.exists():
            yield Interpreter(str(path.resolve()), version[1])


def _folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []

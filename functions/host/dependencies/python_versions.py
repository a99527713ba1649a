"""The versions of Python on this machine, and the one that a function's `requires-python` demands.

Candidates are `python3.N` on the path, and the Pythons of pyenv and uv.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from pilotlight.functions.manifest import ManifestError, read_toml

MINORS = (11, 12, 13, 14)  # supported minor versions of Python 3


class Interpreter(NamedTuple):
    path: str
    version: str

    @property
    def tag(self) -> str:
        """Return the tag in the file names of compiled packages, such as cpython-312."""
        major, minor = self.version.split(".")[:2]
        return f"cpython-{major}{minor}"


OWN = Interpreter(sys.executable, platform.python_version())


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
    home = Path(os.path.expanduser("~"))  # Path.home() raises for a user without a home directory
    pyenv = Path(os.environ.get("PYENV_ROOT") or home / ".pyenv") / "versions"
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR") or home / ".local/share/uv/python")
    for folder in (*_folders(pyenv), *_folders(uv)):
        version = re.match(r"(?:cpython-)?(3\.(\d+)\.\d+)(?:-|\Z)", folder.name)
        path = folder / "bin" / "python3"
        if version is not None and int(version[2]) in MINORS and path.exists():
            yield Interpreter(str(path.resolve()), version[1])


def _folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir()) if parent.is_dir() else []

"""Find the imports in a function's files by parsing them, without running code."""

import ast
import os
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from pilotlight.functions.manifest import Manifest

MAX_SOURCES = 500  # files that are parsed at most
_parsing = threading.Lock()  # Python 3.11 adds up the tree depths of all threads that parse, and raises SystemError


def imports_of(
    manifest: Manifest, max_sources: int = MAX_SOURCES, parse: Callable[[bytes], ast.Module] = ast.parse
) -> list[str]:
    """Return the packages that a function imports; its zygote imports them once for all isolates."""
    folder, own_root = manifest.directory, manifest.main.parent
    local = {path.stem for path in own_root.iterdir()} | {path.stem for path in folder.iterdir()}
    names: dict[str, None] = {}
    for path in islice(_sources(folder), max_sources):
        try:
            with _parsing:
                tree = parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError, RecursionError):
            continue  # the isolate's own import reports the error to the author
        for name in _imported(tree):
            top = name.partition(".")[0]
            if top not in local and top not in ("workers", "js", "pyodide"):
                names[name] = None
    return list(names)[:200]


def _sources(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders[:] = [
            name for name in folders if name not in ("python_modules", "node_modules", "__pycache__") and name[0] != "."
        ]
        for name in files:
            if name.endswith(".py"):
                yield Path(parent) / name


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:  # top level only: imports inside functions may never run
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module

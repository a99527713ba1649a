"""`python -m tests.rooms engine/kv`: list the test files that a change in a folder can break; `make test PKG=engine/kv` runs them. These are the
tests of that folder, and the tests that import one of its modules, directly or through one other module.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from load_tests.house import ROOT, House

TESTS = ROOT / "tests"


def files_for(folder: str) -> list[Path]:
    """Return the test files for a folder of the product, such as "engine/kv", relative to the tree. Raises SystemExit if there is none."""
    room = folder.strip("/").removeprefix("pilotlight/").replace("/", ".")
    house = House(ROOT)
    inside = {name for name in house.modules if name == room or name.startswith(f"{room}.")}
    if not inside:
        known = sorted({name.rpartition(".")[0] for name in house.modules} - {""})
        raise SystemExit(f"no folder of the product is called {folder!r}; there are {', '.join(known)}")
    near = inside | {name for name, imports in house.imports.items() if imports & inside}
    mirror = TESTS.joinpath(*room.split("."))
    return [
        path.relative_to(ROOT)
        for path in sorted(TESTS.rglob("test_*.py"))
        if path.is_relative_to(mirror) or not near.isdisjoint(_imported(path))
    ]


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.removeprefix("pilotlight.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            module = node.module.removeprefix("pilotlight.")
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


if __name__ == "__main__":
    print(*files_for(sys.argv[1]))

"""The use of the product's internals by tests: patched names, private attributes and sleeps.

Each use makes a change of the code more expensive. `python -m load_tests.house` counts them, against limits that only fall.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

VIRTUAL = "tests/simulation/"
NAMED_TUPLE = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}


class Suite:
    """The files below `tests/` of a tree."""

    def __init__(self, root: Path) -> None:
        self.trees = {
            path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted((root / "tests").rglob("*.py"))
        }

    def _nodes(self) -> Iterator[tuple[str, ast.AST]]:
        return ((file, node) for file, tree in self.trees.items() for node in ast.walk(tree))

    def patched_names(self) -> Iterator[str]:
        """Yield the places where a test sets an attribute of a module, a class or an object for its duration."""
        for file, node in self._nodes():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
                yield f"{file}:{node.lineno} {_target(node)}"

    def patched_constants(self) -> Iterator[str]:
        """Yield those patched names that are constants: they belong in a frozen object that is passed in."""
        return (place for place in self.patched_names() if place.rpartition(".")[2].replace("_", "").isupper())

    def private_names(self) -> Iterator[str]:
        """Yield the places where a test reads or imports a name that begins with an underscore."""
        for file, node in self._nodes():
            if isinstance(node, ast.Attribute) and _is_private(node.attr) and not _is_its_own(node.value):
                yield f"{file}:{node.lineno} {ast.unparse(node)[-80:]}"
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{file}:{node.lineno} {alias.name}" for alias in node.names if _is_private(alias.name))

    def pauses(self) -> Iterator[str]:
        """Yield the places where a test sleeps for a fixed time, for which some machine is too slow.

        Not counted: `sleep(0)`, which gives other tasks a turn; sleeps of ten seconds and more, which mean "never"; those of a `while` loop, which
        waits for its condition; and those of the simulation, whose time is virtual.
        """
        for file, tree in self.trees.items():
            if file.startswith(VIRTUAL):
                continue
            waiting = {inner for node in ast.walk(tree) if isinstance(node, ast.While) for inner in ast.walk(node)}
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and node not in waiting and _is_pause(node):
                    yield f"{file}:{node.lineno}"


def _is_pause(call: ast.Call) -> bool:
    if ast.unparse(call.func).rpartition(".")[2] != "sleep" or not call.args:
        return False
    length = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
    return not isinstance(length, int | float) or 0 < length < 10


def _target(call: ast.Call) -> str:
    """Return the dotted name that a call of `setattr` replaces, as far as the source shows it."""
    words = [argument.value if isinstance(argument, ast.Constant) else ast.unparse(argument) for argument in call.args]
    return str(words[0]) if len(words) == 2 else ".".join(map(str, words[:2]))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in NAMED_TUPLE


def _is_its_own(owner: ast.expr) -> bool:
    return isinstance(owner, ast.Name) and owner.id in ("self", "cls", "os", "sys")

"""The extent of the path of one traced request, compared with the files that a reader opens for it.

Measures density, files opened for few functions, and the files of ARCHITECTURE's walk, from the source and a list of functions. request_path.py
traces these.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FEW = 3
_STEP = re.compile(r"^\d+\. `([\w/]+\.py)::([\w.]+)`", re.MULTILINE)


class PathShape(NamedTuple):
    """Measures of a path.

    Lines of a function count from its `def` to its last line, without inner functions that were not entered.
    """

    lines_run: int
    lines_opened: int  # lines of all files that have a function on the path
    files_for_few: list[str]  # files entered for FEW functions or fewer
    walk_files: int
    walk_steps: int
    walk_lines: int  # lines of the path in the files that the walk names

    @property
    def density(self) -> float:
        return self.lines_run / self.lines_opened

    @property
    def walk_share(self) -> float:
        return self.walk_lines / self.lines_run

    def record(self) -> dict[str, float | int]:
        return {
            "density": round(self.density, 3),
            "files_for_few": len(self.files_for_few),
            "walk_files": self.walk_files,
            "walk_steps": self.walk_steps,
            "walk_share": round(self.walk_share, 3),
        }


def shape_of(tree: Path, functions: Iterable[tuple[str, str]]) -> PathShape:
    """Measure the files of `tree` that have the functions, given as (file, qualified name)."""
    by_file: dict[str, set[str]] = {}
    for file, name in functions:
        by_file.setdefault(file, set()).add(name)
    run: dict[str, int] = {}
    opened = 0
    for file, names in by_file.items():
        source = (tree / file).read_text(encoding="utf-8")
        opened += source.count("\n")
        run[file] = len({line for lines in _spans(ast.parse(source), names) for line in lines})
    steps = _STEP.findall((tree / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    walked = {file for file, _ in steps}
    return PathShape(
        sum(run.values()),
        opened,
        sorted(file for file, names in by_file.items() if len(names) <= FEW),
        len(walked),
        len(steps),
        sum(lines for file, lines in run.items() if file in walked),
    )


def _spans(tree: ast.Module, names: set[str]) -> Iterator[range]:
    """Yield the lines of the named functions."""
    for name, node in _functions(tree, ""):
        if name in names:
            inner = [child for child in ast.walk(node) if child is not node and isinstance(child, _FUNCTION)]
            outside = {line for child in inner for line in range(child.lineno, (child.end_lineno or child.lineno) + 1)}
            yield from (
                range(line, line + 1)
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
                if line not in outside
            )


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield functions by their qualified names, as in code objects."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{prefix}{child.name}.")
        elif isinstance(child, _FUNCTION):
            yield f"{prefix}{child.name}", child
            yield from _functions(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _functions(child, prefix)

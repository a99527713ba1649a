"""`python -m load_tests.house`: measure in the source how easily packages can be read and changed.

Measures folder sizes, import cycles and levels, names, and the internals that tests use. Prints a table and exits with 1 if a measure is worse than
its limit, so that CI keeps what was reached. `--tree FOLDER` measures another checkout, `--list` names the places that each measure counted. The
measures of a running request (density, files, tasks) are those of load_tests/request_path.py.
"""

import argparse
import ast
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from load_tests.intrusions import Suite

ROOT = Path(__file__).parents[1]
NO_PRODUCT = {"tests", "load_tests", "examples", "training", "docs", "deploy", "pilotlight"}
PREFIX = "pilotlight."
# Folders whose files intentionally have the names of files elsewhere: implementations of one kernel, and the bindings' classes inside functions.
MIRRORS = ("kernels/triton/", "kernels/cpu/", "functions/sdk/")


class Measure(NamedTuple):
    name: str
    limit: int  # the largest value allowed
    found: list[str]  # the places counted, or one line that names the source of the value
    value: int


class Module(NamedTuple):
    name: str  # dotted name, without the product's name
    file: str  # path relative to the tree
    tree: ast.Module


class House:
    """The product's modules and their imports, also those inside functions and for annotations alone."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.packages = sorted(
            path.parent.name for path in root.glob("*/__init__.py") if path.parent.name not in NO_PRODUCT
        )

    @cached_property
    def modules(self) -> dict[str, Module]:
        return {module.name: module for package in self.packages for module in _modules(self.root, package)}

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        return {name: set(self._imported(module)) - {name} for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                yield from (name for alias in node.names if (name := self._known(alias.name)) is not None)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                for alias in node.names:
                    name = self._known(f"{node.module}.{alias.name}") or self._known(node.module)
                    if name is not None:
                        yield name

    def _known(self, name: str) -> str | None:
        name = name.removeprefix(PREFIX)
        return name if name in self.modules else None


def _modules(root: Path, package: str) -> Iterator[Module]:
    for path in sorted((root / package).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        yield Module(name, file, ast.parse(path.read_text(encoding="utf-8")))


def measures(house: House) -> list[Measure]:
    """Measure a tree. Each limit is the best value reached so far, so limits only fall."""
    full = crowded(house)
    packages = {package: levels(house, package) for package in house.packages}
    folders = {folder: levels(house, folder) for folder in sub_packages(house)}
    suite = Suite(house.root)
    return [
        _largest("modules directly in one folder", 16, full),
        _counted("import circles", 0, (" <-> ".join(circle) for circle in circles(house.imports))),
        _largest("import levels in a package", 14, packages),
        _largest("import levels in a sub-package", 8, folders),
        _counted("attributes set from outside after construction", 0, assigned_outside(house)),
        _counted("base names that occur twice in one package", 0, repeated_names(house)),
        _counted("names that tests patch", 57, suite.patched_names()),
        _counted("constants that tests patch", 5, suite.patched_constants()),
        _counted("private names that tests reach for", 43, suite.private_names()),
        _counted("pauses of a fixed time in tests", 52, suite.pauses()),
    ]


def _largest(name: str, limit: int, values: Mapping[str, int]) -> Measure:
    ordered = sorted(values.items(), key=lambda item: (-item[1], item[0]))
    return Measure(name, limit, [f"{value} {where}" for where, value in ordered[:8]], max(values.values(), default=0))


def _counted(name: str, limit: int, found: Iterable[str]) -> Measure:
    listed = sorted(found)
    return Measure(name, limit, listed, len(listed))


def crowded(house: House) -> dict[str, int]:
    """Return the number of modules of each folder."""
    return Counter(
        str(Path(module.file).parent) for module in house.modules.values() if not module.file.endswith("/__init__.py")
    )


def circles(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan, SIAM J. Comput. 1972)."""
    return [sorted(component) for component in components(imports) if len(component) > 1]


def components(imports: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of a graph, each after those that it points to."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in imports:
        work = [(root, iter(sorted(imports[root])))] if root not in index else []
        while work:
            name, following = work[-1]
            if name not in index:
                index[name] = low[name] = len(index)
                stack.append(name)
            for other in following:
                if other not in imports:
                    continue
                if other not in index:
                    work.append((other, iter(sorted(imports[other]))))
                    break
                if other in stack:
                    low[name] = min(low[name], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    at = stack.index(name)
                    found.append(stack[at:])
                    del stack[at:]
    return found


def sub_packages(house: House) -> list[str]:
    """Return the folders below packages, by their dotted names."""
    return sorted(
        {name for name, module in house.modules.items() if "." in name and module.file.endswith("/__init__.py")}
    )


def levels(house: House, package: str) -> int:
    """Return a package's longest chain of modules that import one another; a cycle counts as one."""
    inside = {name for name in house.modules if name == package or name.startswith(f"{package}.")}
    graph = {name: house.imports[name] & inside for name in inside}
    place = {name: number for number, component in enumerate(components(graph)) for name in component}
    merged: dict[int, set[int]] = defaultdict(set)
    for name, others in graph.items():
        merged[place[name]] |= {place[other] for other in others} - {place[name]}
    depth: dict[int, int] = {}
    for number in TopologicalSorter(merged).static_order():
        depth[number] = 1 + max((depth[other] for other in merged[number]), default=0)
    return max(depth.values(), default=0)


def repeated_names(house: House) -> Iterator[str]:
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for module in house.modules.values():
        path = Path(module.file)
        if path.stem not in ("__init__", "__main__") and not module.file.startswith(MIRRORS):
            places[path.parts[0], path.stem].append(module.file)
    return (" = ".join(files) for files in places.values() if len(files) > 1)


def assigned_outside(house: House) -> Iterator[str]:
    """Yield assignments from outside to attributes that the object's own class sets only to None."""
    placeholders = {name for module in house.modules.values() for name in _placeholders(module.tree)}
    for module in house.modules.values():
        for node, target in _outside_assignments(module.tree):
            if target.attr in placeholders:
                yield f"{module.file}:{node.lineno} {ast.unparse(target)}"


def _placeholders(tree: ast.Module) -> Iterator[str]:
    """Yield public attributes that `__init__` sets to None and no other method of the class sets."""
    for owner in ast.walk(tree):
        if not isinstance(owner, ast.ClassDef):
            continue
        empty: set[str] = set()
        filled: set[str] = set()
        for method in owner.body:
            if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                for target, value in _self_assignments(method):
                    is_empty = method.name == "__init__" and isinstance(value, ast.Constant) and value.value is None
                    (empty if is_empty else filled).add(target)
        yield from (name for name in empty - filled if not name.startswith("_"))


def _self_assignments(method: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(method):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                for part in parts:
                    if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                        yield part.attr, node.value


def _outside_assignments(tree: ast.Module) -> Iterator[tuple[ast.Assign, ast.Attribute]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute) and not (
                    isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")
                ):
                    yield node, target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout to measure")
    parser.add_argument("--list", action="store_true", help="name the places that each measure counted")
    arguments = parser.parse_args()
    found = measures(House(arguments.tree.resolve()))
    for measure in found:
        worse = "  <-- worse than its limit" if measure.value > measure.limit else ""
        print(f"{measure.name:<50} {measure.value:>4}  at most {measure.limit}{worse}")
        if arguments.list or worse:
            shown = measure.found if arguments.list else measure.found[:20]
            print("".join(f"    {line}\n" for line in shown), end="")
            if len(shown) < len(measure.found):
                print(f"    ... and {len(measure.found) - len(shown)} more: --list names all")
    return any(measure.value > measure.limit for measure in found)


if __name__ == "__main__":
    sys.exit(main())

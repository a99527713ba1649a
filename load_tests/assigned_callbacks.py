"""Callbacks assigned after construction: attributes that another object sets to a callable.

"Go to definition" ends at such an attribute. Only the source is analysed. An attribute counts if any annotation of it is Callable (or an alias), or
if a lambda, a `partial` or the name of a function is assigned to it.
"""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Assignment(NamedTuple):
    file: str  # path relative to the tree
    line: int
    target: str  # the target as written, such as `link.sink`
    function: str  # qualified name of the function that contains the assignment


def assigned_callbacks(root: Path, files: Iterable[str]) -> list[Assignment]:
    """Return the assignments in `files` of `root`, in their order."""
    trees = {file: ast.parse((root / file).read_text(encoding="utf-8")) for file in files}
    aliases = {"Callable"} | {name for tree in trees.values() for name in _aliases(tree)}
    attributes = {name for tree in trees.values() for name in _annotated(tree, aliases)}
    return [found for file, tree in trees.items() for found in _assignments(file, tree, attributes)]


def _aliases(tree: ast.Module) -> Iterator[str]:
    """Yield a module's names for types of callables."""
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and _mentions(node.value, {"Callable"})
        ):
            yield node.targets[0].id


def _annotated(tree: ast.Module, aliases: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Attribute)
            and _is_callable(node.annotation, aliases)
        ):
            yield node.target.attr
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if (
                    isinstance(item, ast.AnnAssign)
                    and isinstance(item.target, ast.Name)
                    and _is_callable(item.annotation, aliases)
                ):
                    yield item.target.id


def _is_callable(annotation: ast.expr, aliases: set[str]) -> bool:
    """Tell whether an annotation is a callable type or a union with one, not a list of callables."""
    if isinstance(annotation, ast.BinOp):
        return _is_callable(annotation.left, aliases) or _is_callable(annotation.right, aliases)
    head = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(head, ast.Name) and head.id in aliases


def _mentions(node: ast.AST, names: set[str]) -> bool:
    return any(isinstance(part, ast.Name) and part.id in names for part in ast.walk(node))


def _assignments(file: str, tree: ast.Module, attributes: set[str]) -> Iterator[Assignment]:
    methods = {id(item) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for item in node.body}
    functions = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and id(node) not in methods
    }
    for names, node in _statements(tree, ()):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            for part, value in _pairs(target, node.value):
                if not isinstance(part, ast.Attribute) or isinstance(value, ast.Constant) or value is None:
                    continue
                is_construction = (
                    names[-1:] == ("__init__",) and isinstance(part.value, ast.Name) and part.value.id == "self"
                )
                if not is_construction and (part.attr in attributes or _makes_callable(value, functions)):
                    yield Assignment(file, node.lineno, ast.unparse(part), ".".join(names))


def _statements(node: ast.AST, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ast.Assign | ast.AnnAssign]]:
    """Yield the assignments below a node, each with the names of the enclosing classes and functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Assign | ast.AnnAssign):
            yield names, child
        within = (child.name,) if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) else ()
        yield from _statements(child, (*names, *within))


def _pairs(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Split `a.x, b.y = v, w` into two assignments."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        yield from zip(target.elts, value.elts, strict=True)
    elif isinstance(target, ast.Tuple):
        yield from ((part, value) for part in target.elts)
    else:
        yield target, value


def _makes_callable(value: ast.expr, functions: set[str]) -> bool:
    if isinstance(value, ast.IfExp):
        return _makes_callable(value.body, functions) or _makes_callable(value.orelse, functions)
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "partial"
    return isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)

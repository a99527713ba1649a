"""Mutants: a file of the product with one small change each, such as `<=` for `<`.

The share of mutants that a suite notices measures its quality. Only code inside functions is changed, because tests run it, but no docstrings,
annotations or log lines.
"""

import ast
import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMPARE = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: (r"is\s+not", "is"), ast.In: ("in", "not in"), ast.NotIn: (r"not\s+in", "in"),
}  # fmt: skip
_BINARY = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
}
_LOGGERS = ("log", "logger", "logging")


class Mutant(NamedTuple):
    line: int  # first line
    start: int  # where the replaced text starts, in characters of the source
    end: int
    text: str  # the replacement
    kind: str

    def applied_to(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]


def mutants_of(source: str) -> list[Mutant]:
    """Return every mutant of a module, in the order of its lines.

    A few are not valid Python: `compiles` finds them.
    """
    finder = _Finder(source)
    functions = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    found = {mutant for function in functions for statement in function.body for mutant in finder.find(statement)}
    return sorted(found)


class _Finder:
    def __init__(self, source: str) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines()

    def find(self, node: ast.AST) -> Iterator[Mutant]:
        if _is_left_alone(node):
            return
        yield from self._of(node)
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "args") or isinstance(node, ast.Call):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self.find(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        match node:
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                for before, operator, after in zip([left, *comparators], ops, comparators, strict=False):
                    yield from self._between(before, after, *_COMPARE[type(operator)], "comparison")
            case ast.BoolOp(op=operator, values=values):
                words = ("and", "or") if isinstance(operator, ast.And) else ("or", "and")
                for before, after in itertools.pairwise(values):
                    yield from self._between(before, after, *words, "and/or")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _BINARY:
                yield from self._between(left, right, *_BINARY[type(operator)], "arithmetic")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._mutant(node, self._text(operand), "not")
            case ast.Constant(value=bool() as value):
                yield self._mutant(node, str(not value), "constant")
            case ast.Constant(value=int() as value):
                yield self._mutant(node, str(value + 1), "constant")
            case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
                yield self._mutant(test, f"(not ({self._text(test)}))", "condition")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._mutant(value, "None", "return")
            case ast.Expr(value=ast.Call() | ast.Await()):
                yield self._mutant(node, "pass", "statement")

    def _between(self, before: ast.expr, after: ast.expr, pattern: str, text: str, kind: str) -> Iterator[Mutant]:
        start, end = self._span(before)[1], self._span(after)[0]
        word = rf"\b{pattern}\b" if pattern[0].isalpha() else pattern
        if (match := re.search(word, self._source[start:end])) is not None:
            yield Mutant(before.end_lineno or 0, start + match.start(), start + match.end(), text, kind)

    def _mutant(self, node: ast.expr | ast.stmt, text: str, kind: str) -> Mutant:
        return Mutant(node.lineno, *self._span(node), text, kind)

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._source[start:end]

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._place(node.lineno, node.col_offset), self._place(node.end_lineno, node.end_col_offset)

    def _place(self, line: int, column_bytes: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column_bytes].decode())


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Assert():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in _LOGGERS:
            return True
    return False


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True

"""Words of the code: a class name has one meaning, and a public docstring begins with a verb or with the thing it names."""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    path.parent.name
    for path in ROOT.glob("*/__init__.py")
    if path.parent.name not in ("tests", "load_tests", "training", "pilotlight")
)
# The functions' SDK has the class names of Cloudflare's, whatever ours are; the embedded model's corpus generator is a program of its own.
ELSEWHERE = ("functions/sdk/",)

# First words that make a sentence without a subject: prepositions, relative pronouns and conjunctions.
FRAGMENT = re.compile(
    r"(about|above|after|afterwards|against|also|although|among|as|at|because|before|behind|below|beside|between|beyond"
    r"|but|by|during|except|for|from|how|if|in|inside|instead|into|near|not|of|on|or|over|per|since|so|such|than|that"
    r"|then|there|these|those|though|through|till|to|towards|under|unless|until|upon|what|whatever|when|whenever|where"
    r"|wherever|whether|which|whichever|while|who|whoever|whom|whose|why|with|within|without)\b",
    re.IGNORECASE,
)
# How many public docstrings begin with one. Figures only fall.
BUDGET = {"edge_router": 54, "engine": 45, "functions": 50, "kernels": 23, "runtime": 22, "wire": 21}


def sources(package: str) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((ROOT / package).rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_a_class_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = collections.defaultdict(list)
    for package in PACKAGES:
        for file, tree in sources(package):
            if not file.startswith(ELSEWHERE):
                for node in ast.walk(tree):
                    if isinstance(node, ast.ClassDef):
                        places[node.name].append(f"{file}:{node.lineno}")
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}, "name the second one by what only it is"


@pytest.mark.parametrize("package", [*PACKAGES, "load_tests"])
def test_public_docstrings_begin_with_a_verb_or_with_the_thing(package: str) -> None:
    fragments = [
        f"{file}:{node.lineno} {docstring(node).partition(' ')[0]}"
        for file, tree in sources(package)
        for node in public(tree)
        if FRAGMENT.match(docstring(node))
    ]
    budget = BUDGET.get(package, 0)
    assert len(fragments) <= budget, f"at most {budget} were there before: " + ", ".join(fragments)


def public(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public classes and functions of a module, and the public methods of those classes."""
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            yield child
            if isinstance(child, ast.ClassDef):
                yield from public(child)


def docstring(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return ast.get_docstring(node) or ""

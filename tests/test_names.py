"""Names in the code: a class name has one meaning."""

import ast
import collections
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(
    path.parent.name
    for path in ROOT.glob("*/__init__.py")
    if path.parent.name not in ("tests", "load_tests", "training", "pilotlight")
)
# The functions' SDK has Cloudflare's class names, which may occur in the product too.
ELSEWHERE = ("functions/sdk/",)


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
    assert twice == {}, "rename one of the two by what distinguishes it"

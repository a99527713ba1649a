"""The imports that parsing a function's files finds."""

import ast
from pathlib import Path
from typing import Any

import pytest

from pilotlight.functions.host.dependencies import imports
from pilotlight.functions.manifest import Manifest, load_manifest


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "wrangler.toml").write_text('name = "f"\nmain = "entry.py"\n')
    (tmp_path / "entry.py").write_text("import json\nimport helper\nfrom workers import Response\nfrom . import x\n")
    (tmp_path / "helper.py").write_text("from decimal import Decimal\ndef f():\n    import csv\n")
    (tmp_path / "broken.py").write_text("import (")
    return load_manifest(tmp_path)


def test_imports_of_elsewhere_at_the_top_of_its_files_are_found(manifest: Manifest) -> None:
    assert sorted(imports.imports_of(manifest)) == ["decimal", "json"]


def test_one_tree_at_a_time_is_made(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    parse, were_locked = ast.parse, []

    def locked(source: Any) -> ast.Module:
        were_locked.append(imports._parsing.locked())
        return parse(source)

    monkeypatch.setattr(ast, "parse", locked)
    imports.imports_of(manifest)
    assert were_locked == [True] * 3


def test_so_many_files_are_read_and_no_more_and_none_that_belongs_to_a_workplace(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("python_modules", "node_modules", "__pycache__", ".venv", "more"):
        (manifest.directory / folder).mkdir()
        for number in range(4):
            (manifest.directory / folder / f"m{number}.py").write_text(f"import {folder.strip('_.')}_{number}")
    (manifest.directory / "more" / "notes.txt").write_text("import this")
    found = [name for name in imports.imports_of(manifest) if name.startswith("more")]
    assert sorted(found) == [f"more_{number}" for number in range(4)]
    assert not any(name.endswith("_0") and not name.startswith("more") for name in imports.imports_of(manifest))
    parse, read = ast.parse, list[bytes]()
    for most in (0, 1, 5, 100):
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(ast, "parse", lambda source: (read.append(source), parse(source))[1])
            imports.imports_of(manifest, most)
        assert len(read) == min(most, 7)

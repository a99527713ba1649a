"""What a function's files import, as far as reading them shows it."""

import ast
from pathlib import Path
from typing import Any

import pytest

from runtime.functions.host import imports
from runtime.functions.manifest import Manifest, load_manifest


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

"""The imports that parsing a function's files finds."""

import ast
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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


def test_one_tree_at_a_time_is_made(manifest: Manifest) -> None:
    alone, num_parsed = threading.Lock(), 0

    def parse(source: bytes) -> ast.Module:
        nonlocal num_parsed
        assert alone.acquire(blocking=False), "another thread parses"
        for _ in range(100):
            time.sleep(0)  # another thread's turn
        num_parsed += 1
        alone.release()
        return ast.parse(source)

    with ThreadPoolExecutor(4) as threads:
        for found in [threads.submit(imports.imports_of, manifest, parse=parse) for _ in range(4)]:
            assert sorted(found.result()) == ["decimal", "json"]
    assert num_parsed == 12


def test_so_many_files_are_read_and_no_more_and_none_that_belongs_to_a_workplace(manifest: Manifest) -> None:
    for folder in ("python_modules", "node_modules", "__pycache__", ".venv", "more"):
        (manifest.directory / folder).mkdir()
        for number in range(4):
            (manifest.directory / folder / f"m{number}.py").write_text(f"import {folder.strip('_.')}_{number}")
    (manifest.directory / "more" / "notes.txt").write_text("import this")
    found = [name for name in imports.imports_of(manifest) if name.startswith("more")]
    assert sorted(found) == [f"more_{number}" for number in range(4)]
    assert not any(name.endswith("_0") and not name.startswith("more") for name in imports.imports_of(manifest))
    read = list[bytes]()
    for most in (0, 1, 5, 100):
        read.clear()
        imports.imports_of(manifest, most, lambda source: (read.append(source), ast.parse(source))[1])
        assert len(read) == min(most, 7)

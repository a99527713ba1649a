"""The import of a function's module, which an isolate compiles before a request needs it."""

import os
import sys
from pathlib import Path

import pytest

from pilotlight.functions.sandbox.zygotes.isolate_main import EarlyLoader


def loader_of(folder: Path, source: str, name: str = "compiled_early.py") -> EarlyLoader:
    (folder / name).write_text(source)
    sys.modules.pop(name.removesuffix(".py"), None)
    return EarlyLoader(str(folder / name))


def test_a_module_runs_at_its_import_and_not_when_it_is_compiled(tmp_path: Path) -> None:
    loader = loader_of(
        tmp_path, f"import pathlib\npathlib.Path({str(tmp_path / 'has_run')!r}).touch()\nvalue = __name__, __file__"
    )
    assert not (tmp_path / "has_run").exists()
    module = loader.imported()
    assert module.value == ("compiled_early", str(tmp_path / "compiled_early.py"))
    assert sys.modules["compiled_early"] is module
    assert (tmp_path / "has_run").exists()


def test_a_file_that_was_changed_before_its_import_is_compiled_again(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, "value = 1")
    before = os.stat(loader.path)
    (tmp_path / "compiled_early.py").write_text("value = 2")
    os.utime(loader.path, (before.st_atime, before.st_mtime + 1.0))
    assert loader.imported().value == 2


def test_an_error_of_the_compiler_is_raised_by_the_import(tmp_path: Path) -> None:
    loader = loader_of(tmp_path, "value = (")
    with pytest.raises(SyntaxError):
        loader.imported()


def test_a_module_named_like_one_of_the_library_does_not_hide_it(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("value = 1")
    library = sys.modules["json"]
    assert EarlyLoader(str(tmp_path / "json.py")).imported().__name__ == "json_function"
    assert sys.modules["json"] is library

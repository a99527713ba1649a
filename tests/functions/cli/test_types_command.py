"""`pilotlight types`: its output can be imported by functions."""

from pathlib import Path

from pilotlight.functions.bindings.registry import OPENERS
from pilotlight.functions.cli.types_command import types
from workers.bindings import FACES

MANIFEST = """
name = "f"
main = "entry.py"
[vars]
WORD = "x"
COUNT = 3
[[kv_namespaces]]
binding = "CACHE"
id = "1"
[browser]
binding = "B"
"""


def test_bindings_and_values_become_annotations(tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("")
    (tmp_path / "wrangler.toml").write_text(MANIFEST)
    source = types(tmp_path, None)
    made: dict[str, object] = {}
    exec(source, made)
    annotations = made["Env"].__annotations__
    assert {name: kind.__name__ for name, kind in annotations.items()} == {
        "B": "Any", "CACHE": "KVNamespace", "COUNT": "int", "WORD": "str",
    }  # fmt: skip


def test_every_kind_that_a_site_opens_has_a_class_in_functions() -> None:
    assert set(OPENERS) <= set(FACES)

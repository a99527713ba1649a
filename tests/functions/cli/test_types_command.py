"""`pilotlight types`: what it prints can be imported where functions run, and names every kind of binding."""

from pathlib import Path

import pytest

from pilotlight.functions.bindings.registry import OPENERS
from pilotlight.functions.cli.types_command import FACES, types
from workers.bindings import _FACES

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


@pytest.mark.parametrize("kind", sorted(OPENERS))
def test_every_kind_is_the_face_that_a_function_gets(kind: str) -> None:
    module, _, name = FACES[kind].partition(".")
    face = _FACES[kind]
    assert (face.__module__, face.__name__) == (f"workers.bindings.{module}", name)  # type: ignore[attr-defined]

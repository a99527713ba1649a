"""Write the JSON Schemas of configuration files for editors: `python -m load_tests.config_schema`.

The meaning of a key is the string below its field, which only this module reads.
"""

import ast
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import msgspec

from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from pilotlight.sites.table import Table

HERE = Path(__file__).parents[1] / "sites"
FILES: dict[str, type[Table]] = {"site.schema.json": SiteConfig, "network.schema.json": NetworkConfig}


def render(table: type[Table]) -> str:
    _, tables = msgspec.json.schema_components([table], ref_template="#/$defs/{name}")
    for kind in _subclasses(Table):
        if kind.__name__ in tables:
            if "description" in tables[kind.__name__]:
                tables[kind.__name__]["description"] = inspect.getdoc(kind)  # msgspec indents it or not
            fields = tables[kind.__name__]["properties"]
            for name, meaning in _meanings(kind).items():
                fields[name] = {"description": meaning, **fields[name]}
    top = tables.pop(table.__name__)
    text = json.dumps({"$defs": tables, **top}, indent=2)
    return text.replace(r"\\Z", "$") + "\n"  # in JSON Schema, the end of a string is $


def _subclasses(kind: type[Table]) -> Iterator[type[Table]]:
    for inner in kind.__subclasses__():
        yield inner
        yield from _subclasses(inner)


def _meanings(kind: type[Table]) -> dict[str, str]:
    """Return the strings below the fields of a table and of its bases, by field."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__[: kind.__mro__.index(Table)]):
        (table,) = ast.parse(inspect.getsource(each)).body
        assert isinstance(table, ast.ClassDef)
        for field, below in pairwise(table.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                    found[name] = " ".join(meaning.split())
    return found


if __name__ == "__main__":
    for file_name, table in FILES.items():
        (HERE / file_name).write_text(render(table), encoding="utf-8")

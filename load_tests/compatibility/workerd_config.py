"""A reader of workerd's test files (`*.wd-test`): the part of Cap'n Proto's text format that they use."""

import re
from pathlib import Path
from typing import Any, NamedTuple

TOKEN = re.compile(r'#[^\n]*|"((?:[^"\\]|\\.)*)"|([A-Za-z0-9_.]+)|(\S)')
TEMPLATES = {"%PYTHON_FEATURE_FLAGS": '"python_workers"', "%PYTHON_VENDORED_MODULES%": ""}


class Embed(NamedTuple):
    path: str


class Worker(NamedTuple):
    """One service of a test that is a worker."""

    name: str
    modules: dict[str, Path]  # by name; the first one is the main module
    bindings: list[dict[str, Any]]
    classes: list[str]  # of Durable Objects
    flags: list[str]

    @property
    def is_python(self) -> bool:
        return any(path.suffix == ".py" for path in self.modules.values())

    @property
    def main(self) -> str:
        return next(iter(self.modules))


def workers(file: Path) -> list[Worker]:
    """Return the workers that a test's services name, in their order."""
    constants = _Parser(file.read_text()).constants()
    config = next(value for value in constants.values() if "services" in value)
    found = []
    for service in config["services"]:
        worker = service.get("worker")
        if isinstance(worker, str):
            worker = constants[worker.removeprefix(".")]
        if worker is not None:
            found.append(_worker(service["name"], worker, file.parent))
    return found


def _worker(name: str, fields: dict[str, Any], folder: Path) -> Worker:
    modules = {}
    for module in fields["modules"]:
        for embed in module.values():
            if isinstance(embed, Embed):
                at = folder / embed.path
                modules[module["name"]] = at if at.exists() else folder.parent / embed.path
    objects = [each["className"] for each in fields.get("durableObjectNamespaces", [])]
    return Worker(name, modules, fields.get("bindings", []), objects, fields.get("compatibilityFlags", []))


class _Parser:
    """Reads `const NAME :TYPE = VALUE;`: a struct becomes a dict, and a name stays a str."""

    def __init__(self, text: str) -> None:
        for name, value in TEMPLATES.items():
            text = text.replace(name, value)
        self._tokens = [
            (match[0] if match[1] is None else match[1], match[1] is not None)
            for match in TOKEN.finditer(text)
            if not match[0].startswith("#")
        ]

    def constants(self) -> dict[str, Any]:
        found = {}
        while self._tokens:
            if self._next() == "const":
                name = self._next()
                while self._next() != "=":
                    pass
                found[name] = self._value()
        return found

    def _next(self) -> str:
        return self._tokens.pop(0)[0]

    def _value(self) -> Any:
        is_text = self._tokens[0][1]
        token = self._next()
        if is_text:
            return token
        if token == "embed":
            return Embed(self._next())
        if token == "[":
            return self._items()
        return self._fields() if token == "(" else token

    def _items(self) -> list[Any]:
        items = []
        while self._tokens[0] != ("]", False):
            items.append(self._value())
            self._skip_comma()
        self._next()
        return items

    def _fields(self) -> dict[str, Any]:
        fields = {}
        while self._tokens[0] != (")", False):
            name = self._next()
            assert self._next() == "=", name
            fields[name] = self._value()
            self._skip_comma()
        self._next()
        return fields

    def _skip_comma(self) -> None:
        if self._tokens[0] == (",", False):
            self._next()

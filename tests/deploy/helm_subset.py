"""A renderer of the subset of Helm's template language that our chart uses: fields, `if`/`else`, `range`, `quote`, `indent`, `toYaml`, `toJson`,
`sha256sum`, `default`, `regexFind`, `replace`, `float64`, `minf`, `int`, `add`, `max` and trimmed whitespace.

The language is Go's text/template. An action that this renderer does not support is an error.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_BEFORE, _AFTER = re.compile(r"\s+\Z"), re.compile(r"\A\s+")


class _Node(NamedTuple):
    kind: str  # text, value, if, range
    said: str
    inner: "list[_Node]"
    otherwise: "list[_Node]"


def render(template: str, values: dict[str, Any], release: str) -> str:
    """Return the text of a rendered template. Raises ValueError if an action is not supported."""
    nodes = _parse(iter(_tokens(template)), ends=("",))[0]
    root = {"Values": values, "Release": {"Name": release}}
    return _written(nodes, root, root)


def rendered(chart: Path, changes: dict[str, Any], release: str = "pl") -> list[dict[str, Any]]:
    """Return the resources of a chart. `changes` replaces top-level keys of its values.yaml."""
    values = yaml.safe_load((chart / "values.yaml").read_text()) | changes
    texts = [render(path.read_text(), values, release) for path in sorted((chart / "templates").glob("*.yaml"))]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def _tokens(template: str) -> list[tuple[str, str]]:
    found, at, trims = [], 0, False
    for match in _ACTION.finditer(template):
        text = template[at : match.start()]
        text = _AFTER.sub("", text) if trims else text
        found.append(("text", _BEFORE.sub("", text) if match[1] else text))
        found.append(("action", match[2]))
        at, trims = match.end(), bool(match[3])
    text = template[at:]
    return [*found, ("text", _AFTER.sub("", text) if trims else text)]


def _parse(tokens: Iterator[tuple[str, str]], ends: tuple[str, ...]) -> tuple[list[_Node], str]:
    nodes: list[_Node] = []
    for kind, said in tokens:
        word = said.split(maxsplit=1)[0] if kind == "action" and said else ""
        if kind == "text":
            nodes.append(_Node("text", said, [], []))
        elif word in ("if", "range"):
            inner, end = _parse(tokens, ("else", "end"))
            otherwise = _parse(tokens, ("end",))[0] if end == "else" else []
            nodes.append(_Node(word, said.split(maxsplit=1)[1], inner, otherwise))
        elif word in ("else", "end"):
            if word not in ends:
                raise ValueError(f"{{{{ {said} }}}} ends nothing")
            return nodes, word
        else:
            nodes.append(_Node("value", said, [], []))
    if "" not in ends:
        raise ValueError(f"{' or '.join(ends)} is missing")
    return nodes, ""


def _written(nodes: list[_Node], dot: Any, root: Any) -> str:
    parts = []
    for node in nodes:
        match node.kind:
            case "text":
                parts.append(node.said)
            case "if":
                chosen = node.inner if _value(node.said, dot, root) else node.otherwise
                parts.append(_written(chosen, dot, root))
            case "range":
                parts += [_written(node.inner, each, root) for each in _value(node.said, dot, root)]
            case _:
                parts.append(_shown(_value(node.said, dot, root)))
    return "".join(parts)


def _value(expression: str, dot: Any, root: Any) -> Any:
    first, *pipes = [part.strip() for part in expression.split("|")]
    value = root if first.startswith("$") else dot
    if not re.fullmatch(r"\.|\$?(\.\w+)+", first):
        raise ValueError(f"{first!r} is not supported by this renderer")
    for name in filter(None, first.removeprefix("$").split(".")):
        value = value.get(name)
    for pipe in pipes:
        word, *arguments = shlex.split(pipe)
        match word:
            case "quote":
                value = json.dumps(_shown(value))
            case "toYaml":
                value = yaml.safe_dump(value, default_flow_style=False).rstrip("\n")
            case "toJson":
                value = json.dumps(value, sort_keys=True)
            case "sha256sum":
                value = hashlib.sha256(str(value).encode()).hexdigest()
            case "default":
                value = value or arguments[0]
            case "regexFind":
                found = re.search(arguments[0], value)
                value = found[0] if found is not None else ""
            case "replace":
                value = value.replace(arguments[0], arguments[1])
            case "float64":
                value = float(value)
            case "minf":
                value = min(value, float(arguments[0]))
            case "int":
                value = int(value)
            case "add":
                value += int(arguments[0])
            case "max":
                value = max(value, int(arguments[0]))
            case "indent":
                value = "\n".join(" " * int(arguments[0]) + line for line in str(value).split("\n"))
            case _:
                raise ValueError(f"{word!r} is not supported by this renderer")
    return value


def _shown(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

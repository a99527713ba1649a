"""`python -m load_tests.reference`: generate the pages of docs/reference/ from the code.

Configuration keys, metrics, HTTP API and commands. Each page is a function without arguments that returns Markdown. A test compares the pages with
the files, so a page is never older than its code.
"""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from load_tests.config_schema import render
from pilotlight.dialects.openapi import document
from pilotlight.runtime.cli.commands import app
from pilotlight.sites.network import NetworkConfig
from pilotlight.sites.site import SiteConfig
from pilotlight.sites.table import Table

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
GENERATED = "<!-- written by python -m load_tests.reference -->\n"

Schema = Mapping[str, Any]


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    print(f"{len(PAGES)} pages of {FOLDER.relative_to(ROOT)} are written.")


def configuration() -> str:
    """Return the page of all keys of a site's and a router's file."""
    text = (
        "# Configuration\n\nA site and a router have one TOML file each. An unknown key stops the start, and the error names the valid keys. "
        "Sizes are in GiB or MiB, times in seconds or milliseconds, as the key's name says. A relative path begins at the directory in which the "
        "process was started. SIGHUP makes a process read its file again; the log names the changes that need a restart. "
        "[Site files](../../sites/README.md) has a commented example.\n"
    )
    for title, kind in (("Site file", SiteConfig), ("Router file", NetworkConfig)):
        text += f"\n## {title}\n"
        for name, rows in config_tables(kind):
            text += f"\n### {title.split()[0]}: `{name}`\n\n" if name else "\n"
            text += _table(("key", "value", "default", "meaning"), rows)
    return _page(text)


def config_tables(kind: type[Table]) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
    """Yield each table of a file by its TOML name, with its rows: key, value, default and meaning.

    Nested tables follow their parent."""
    schema = json.loads(render(kind))
    yield from _tables("", schema, schema["$defs"])


def _tables(name: str, schema: Schema, known: Mapping[str, Schema]) -> Iterator[tuple[str, Sequence[tuple[str, ...]]]]:
    prefix = f"{name.strip('[]')}." if name else ""
    rows, inner = [], []
    for key, field in schema["properties"].items():
        table, is_array, by_name = _table_of(field, known)
        default = "required" if key in schema.get("required", ()) else "" if table is not None else _default(field)
        if table is None:
            rows.append((f"`{prefix}{key}`", _value(field), default, field.get("description", "")))
        else:
            path = f"{prefix}{key}{'.NAME' if by_name else ''}"
            label = f"[[{path}]]" if is_array else f"[{path}]"
            rows.append((f"`{prefix}{key}`", f"table `{label}`", default, field.get("description", "")))
            inner.append((label, table))
    yield name, rows
    for label, table in inner:
        yield from _tables(label, table, known)


def _table_of(field: Schema, known: Mapping[str, Schema]) -> tuple[Schema | None, bool, bool]:
    """Return the schema of the table that a field holds, None if it holds a value; and two flags.

    The flags tell whether the field is an array of tables, and whether it maps names to tables.
    """
    for part in field.get("anyOf", [field]):
        if "$ref" in part:
            return known[part["$ref"].rpartition("/")[2]], False, False
        if part.get("type") == "array" and "$ref" in part.get("items", {}):
            return known[part["items"]["$ref"].rpartition("/")[2]], True, False
        if part.get("type") == "object" and "$ref" in (part.get("additionalProperties") or {}):
            return known[part["additionalProperties"]["$ref"].rpartition("/")[2]], False, True
    return None, False, False


_TYPES = {"string": "string", "number": "number", "integer": "integer", "boolean": "true or false"}
_BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def _value(field: Schema) -> str:
    parts = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    return " or ".join(dict.fromkeys(_one_value(part) for part in parts))


def _one_value(part: Schema) -> str:
    if "enum" in part:
        return ", ".join(f"`{value}`" for value in part["enum"])
    if part.get("type") == "array":
        return f"list of {_value(part['items'])}" if "items" in part else "list"
    if part.get("type") == "object":
        return "table"
    if part.get("format") == "date-time":
        return "time"
    name = _TYPES.get(str(part.get("type")), "value")
    bounds = [f"{word} {_number(part[key])}" for key, word in _BOUNDS.items() if key in part]
    return " ".join([name, " and ".join(bounds)]).strip()


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


def _default(field: Schema) -> str:
    default = field.get("default", "")
    if default is None or default == "" or default == []:
        return "unset" if default is None else "none" if default == [] else ""
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{json.dumps(default)}`"


class Metric(NamedTuple):
    """A metric as the code declares it."""

    name: str
    kind: str  # counter, gauge or histogram
    meaning: str
    labels: tuple[str, ...]


def metrics() -> str:
    """Return the page of all metrics of sites and routers."""
    text = (
        "# Metrics\n\nSites and routers publish their metrics in Prometheus's text format at `/metrics`. Where keys are required, the request "
        "needs a key with the scope `metrics`. A counter's samples end in `_total`; a histogram has `_bucket`, `_sum` and `_count`. Names that "
        "begin with `vllm:` have vLLM's meaning, so dashboards for vLLM work. Dashboards for Grafana are in `deploy/grafana/`.\n"
    )
    for title, package in (("Site", "runtime"), ("Router", "edge_router")):
        found = sorted(declared_metrics(package), key=lambda metric: metric.name)
        rows = [
            (f"`{one.name}`", one.kind, ", ".join(f"`{label}`" for label in one.labels), one.meaning) for one in found
        ]
        text += f"\n## {title}\n\n{_table(('metric', 'type', 'labels', 'meaning'), rows)}"
    text += (
        "\nA router also publishes the process metrics of Prometheus's client library (`process_*`). A site on a machine with NVIDIA GPUs "
        "publishes `pilotlight_gpu_*` with the label `gpu`: clocks, power, temperature, memory, errors and reasons for lower clocks.\n"
    )
    return _page(text)


_KINDS = {
    "Counter": "counter", "counter": "counter", "CounterMetricFamily": "counter", "_COUNTER": "counter", "_counts": "counter",
    "Gauge": "gauge", "GaugeMetricFamily": "gauge", "_GAUGE": "gauge", "watch": "gauge", "gauge": "gauge",
    "Histogram": "histogram", "times": "histogram", "_times": "histogram",
}  # fmt: skip
_ROUTER = "pilotlight_router_"
_PREFIXES = {"_counts": _ROUTER, "_times": _ROUTER, "watch": _ROUTER, "gauge": f"{_ROUTER}site_"}
# For each table of metrics with rows (kind, name, meaning, read): the prefix of the names, and the labels.
_TABLES = {"_OF_LOADS": ("", ("model_name", "engine"))}
_GAUGES = "_gauges"  # the method of a site that returns gauges by name, each with its meaning


def declared_metrics(package: str) -> Iterator[Metric]:
    """Yield the metrics that a package's source declares."""
    for path in sorted((ROOT / package).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "metric" in text.lower() or "pilotlight_" in text or _GAUGES in text:
            yield from _declared(ast.parse(text))


def _declared(tree: ast.Module) -> Iterator[Metric]:
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id in _TABLES:
            prefix, labels = _TABLES[node.target.id]
            for row in node.value.elts if isinstance(node.value, ast.Tuple) else ():
                assert isinstance(row, ast.Tuple)
                kind, name, meaning = (_text(part, {}) for part in row.elts[:3])
                yield Metric(prefix + name, _KINDS[kind], meaning, labels)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            if function.name == _GAUGES:
                yield from _site_gauges(function)
            yield from _declared_in(function)


def _site_gauges(function: ast.AST) -> Iterator[Metric]:
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                assert isinstance(value, ast.Tuple)
                yield Metric(f"pilotlight_{_text(key, {})}", "gauge", _text(value.elts[0], {}), ())


def _declared_in(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[Metric]:
    """Yield the metrics that calls in a function create.

    A name to which a string literal was assigned earlier in the function counts as that literal.
    """
    known: dict[str, Any] = {}
    for node in sorted(_nodes(function), key=lambda node: (node.lineno, node.col_offset)):
        if isinstance(node, ast.Assign):
            for target, value in _assigned(node):
                known[target] = value
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else _text(node.func, {})
            name, meaning = _text(node.args[0], known), _text(node.args[1], known)
            whole = _PREFIXES.get(called, "") + name
            if called in _KINDS and meaning and re.fullmatch(r"(pilotlight_|vllm:)[a-z0-9_]+", whole):
                yield Metric(whole, _KINDS[called], meaning, _labels(called, node, known))


def _nodes(function: ast.AST) -> list[ast.Assign | ast.Call]:
    return [node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.Call)]


def _assigned(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    for target in node.targets:
        if isinstance(target, ast.Name):
            yield target.id, node.value
        elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            pairs = zip(target.elts, node.value.elts, strict=True)
            yield from ((part.id, value) for part, value in pairs if isinstance(part, ast.Name))


def _labels(called: str, node: ast.Call, known: Mapping[str, ast.expr]) -> tuple[str, ...]:
    keyword = next((word.value for word in node.keywords if word.arg == "labels"), None)
    if called in ("_counts", "gauge"):
        found = [_text(argument, {}) for argument in node.args[2:]]
    elif called == "_times":
        found = [_text(argument, {}) for argument in node.args[3:]]
    else:
        place = keyword if keyword is not None else node.args[2] if len(node.args) > 2 else None
        found = _texts(place, known)
    return tuple([*(("site",) if called == "gauge" else ()), *found])


def _texts(node: ast.expr | None, known: Mapping[str, ast.expr]) -> list[str]:
    if isinstance(node, ast.Name) and node.id in known:
        return _texts(known[node.id], known)
    if isinstance(node, ast.List | ast.Tuple):
        return [
            text
            for part in node.elts
            for text in (_texts(part.value, known) if isinstance(part, ast.Starred) else [_text(part, known)])
        ]
    return []


def _text(node: ast.expr | None, known: Mapping[str, ast.expr]) -> str:
    """Return the string of a literal or of a name in `known`; for other names the name; otherwise ""."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return _text(known[node.id], {}) if node.id in known else node.id
    return ""


def api() -> str:
    """Return the page of the HTTP API, from the OpenAPI document that sites and routers serve."""
    told = json.loads(document("0.1.0"))
    schemas = told["components"]["schemas"]
    text = (
        "# API reference\n\nEvery site and router serves this as an OpenAPI document at `/openapi.json`, and as a page at `/docs`. `/ai/v1/...` and "
        "`/client/v4/accounts/{account_id}/ai/v1/...` are the same as `/v1/...`. A key is sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. "
        "Fields that a model or the engine cannot honour are refused by name; unknown fields are listed in the header `x-ignored-fields`.\n\n"
        "Files of text that a message contains (OpenAI's `file` and `input_file` with `file_data`, Anthropic's `document`) become their name and "
        "text, whatever their type. A PDF file becomes a sentence that it cannot be read, and is listed in `x-ignored-fields`. `file_id` and "
        "`file_url` are refused.\n\n"
        "Besides these, a router answers `POST /v1/batches` and `/v1/files` (OpenAI's batches), `/fn/NAME/...` (functions), `GET /usage`, and "
        "`/debug/route` (why a request would go to which site); `/livez`, `/readyz`, `/metrics` and `/status` are on every process.\n\n"
    )
    rows = [
        (f"[`{method.upper()} {path}`](#{_anchor(method, path)})", each["summary"])
        for path, methods in told["paths"].items()
        for method, each in methods.items()
    ]
    text += _table(("operation", "what it does"), rows)
    for path, methods in told["paths"].items():
        for method, each in methods.items():
            text += f"\n## `{method.upper()} {path}`\n\n{each['summary']}.\n"
            text += _fields(
                "Query",
                [(one["name"], one["schema"], False) for one in each.get("parameters", ()) if one["in"] == "query"],
                schemas,
            )
            body = each.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
            for schema in body.get("anyOf", [body]) if body else ():
                name, fields = _schema_fields(schema, schemas)
                text += _fields(f"Body{f', `{name}`' if name and 'anyOf' in body else ''}", fields, schemas)
            if "text/event-stream" in each["responses"]["200"]["content"]:
                text += "\nWith `stream: true` the answer is a stream of server-sent events.\n"
    return _page(text)


def _anchor(method: str, path: str) -> str:
    """Return the anchor of an operation's heading, as GitHub and Python-Markdown make it."""
    return re.sub(r"[^\w -]", "", f"{method} {path}".lower()).replace(" ", "-")


def _schema_fields(schema: Schema, schemas: Mapping[str, Schema]) -> tuple[str, list[tuple[str, Schema, bool]]]:
    name = schema["$ref"].rpartition("/")[2] if "$ref" in schema else ""
    found = schemas[name] if name else schema
    required = found.get("required", ())
    return name, [(key, field, key in required) for key, field in found.get("properties", {}).items()]


def _fields(title: str, fields: list[tuple[str, Schema, bool]], schemas: Mapping[str, Schema]) -> str:
    if not fields:
        return ""
    rows = [
        (f"`{name}`", _api_type(field, schemas), "yes" if is_required else "") for name, field, is_required in fields
    ]
    return f"\n{title}:\n\n{_table(('field', 'type', 'required'), rows)}"


def _api_type(field: Schema, schemas: Mapping[str, Schema]) -> str:
    parts = [part for part in field.get("anyOf", [field]) if part.get("type") != "null"]
    return " or ".join(dict.fromkeys(_one_api_type(part, schemas) for part in parts)) or "any"


def _one_api_type(part: Schema, schemas: Mapping[str, Schema]) -> str:
    if "$ref" in part:
        found = schemas.get(part["$ref"].rpartition("/")[2], {})
        return "object" if "properties" in found or found.get("type") == "object" else _api_type(found, schemas)
    if "enum" in part or "const" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part.get("enum", [part.get("const")]))
    kind = part.get("type")
    if kind == "array":
        return f"array of {_api_type(part['items'], schemas)}" if part.get("items") else "array"
    bounds = [f"{word} {_number(part[key])}" for key, word in _BOUNDS.items() if key in part]
    return " ".join([str(kind or "any"), " and ".join(bounds)]).strip()


def commands() -> str:
    """Return the page of the command line, from its help."""
    text = (
        "# Commands\n\n`pilotlight COMMAND --help` prints the same. Commands that ask a router or a site take its URL from `PILOTLIGHT_URL` and the "
        "key from `PILOTLIGHT_API_KEY`.\n"
    )
    for name, callback in sorted(_commands("pilotlight", app)):
        text += f"\n## `{name}`\n\n{_plain(inspect.getdoc(callback) or '')}\n"
        hints = get_type_hints(callback, include_extras=True)
        given = inspect.signature(callback).parameters
        rows = [row for key, one in given.items() if (row := _parameter(key, hints[key], one.default)) is not None]
        if rows:
            text += f"\n{_table(('argument', 'value', 'default', 'meaning'), rows)}"
    return _page(text)


def _commands(name: str, group: typer.Typer) -> Iterator[tuple[str, Callable[..., Any]]]:
    for command in group.registered_commands:
        if command.callback is not None and not command.hidden:
            yield f"{name} {command.name or command.callback.__name__.replace('_', '-')}", command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from _commands(f"{name} {inner.name}", inner.typer_instance)


def _parameter(key: str, hint: Any, default: Any) -> tuple[str, ...] | None:
    if hint is typer.Context:
        return None
    plain = typer.Argument() if default is inspect.Parameter.empty else typer.Option()
    kind, info = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, plain)
    if info.hidden:
        return None
    kinds = (
        [part for part in get_args(kind) if part is not type(None)]
        if get_origin(kind) in (Union, UnionType)
        else [kind]
    )
    is_flag = kinds == [bool]
    if isinstance(info, OptionInfo):
        # in an annotation typer keeps the first name where a default may be
        named = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        names = named or [f"--{key.replace('_', '-')}"]
        name = ", ".join(f"`{each}`" for each in names)
    else:
        name = f"`{key.upper()}`"
    words = {int: "integer", float: "number", str: "text", Path: "path"}
    value = "" if is_flag else info.metavar or " or ".join(words.get(one, "text, repeatable") for one in kinds)
    shown = "" if is_flag or default in (None, inspect.Parameter.empty, ()) else f"`{_relative(default)}`"
    required = "required" if default is inspect.Parameter.empty else shown
    return name, value, required, _plain(info.help or "")


def _relative(default: Any) -> str:
    return (
        str(default.relative_to(ROOT)) if isinstance(default, Path) and default.is_relative_to(ROOT) else str(default)
    )


def _plain(text: str) -> str:
    """Return help without the escapes of rich's markup."""
    return " ".join(text.replace("\\[", "[").split())


def _table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def _page(text: str) -> str:
    title, _, rest = text.partition("\n")
    return f"{title}\n\n{GENERATED}{rest}"


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "api.md": api,
    "commands.md": commands,
}

if __name__ == "__main__":
    main()

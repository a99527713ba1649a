"""The Jinja environment that chat templates are written against, and run in.

Templates come with checkpoints, so they are code from elsewhere: they run in Jinja's immutable sandbox and see plain JSON values only. Round them are
trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, `{% generation %}`, break and continue. Imported when a template
is compiled (chat_template.py), for Jinja is slow to import. Refuses to know messages.
"""

import json
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; when serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's interface

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _make_environment()
# What the compiler raises for a template that is none; the last three are Python's, of one that nests too deep for what Jinja makes of it.
NOT_COMPILED = (TemplateError, SyntaxError, RecursionError, ValueError)

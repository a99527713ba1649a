"""The Jinja environment in which chat templates run.

Templates come with checkpoints, so they are untrusted code: they run in Jinja's immutable sandbox, see only copies of plain JSON values, and no
operator can make a large value from small ones. A process in which a template runs long or needs much memory is killed
(runtime/generation/rendering.py).
Templates get trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, `{% generation %}`, break and continue. This
module is imported when a template is compiled (chat_template.py), because Jinja is slow to import. This module is independent of messages.
"""

import json
import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_ITEMS = 1_000_000  # most items of a text or list made by multiplication
MOST_BITS = 4096  # most bits of an integer
_WIDE = re.compile(
    r"%(?:\([^()]*\))?[^a-zA-Z%]*(?:\*|\d{5})"
)  # a format with a width or precision above 9,999, or with one that is an argument


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with lists that can grow, and operators that refuse to make large values."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow `append` and `pop` of lists, which some templates of Kimi K2 use."""
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _is_explosive(operator, left, right):
            raise SecurityError(f"{operator!r} would make something too large")
        return super().call_binop(context, operator, left, right)


def _is_explosive(operator: str, left: Any, right: Any) -> bool:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        return operator != "%" and bits > MOST_BITS
    if operator == "%":
        return isinstance(left, str) and _WIDE.search(left) is not None
    texts = [(left, right), (right, left)]
    return any(
        isinstance(times, int) and hasattr(items, "__len__") and len(items) * times > MOST_ITEMS
        for items, times in texts
    )


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text for training and has no effect here."""

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
    if isinstance(value, Iterator):  # llama.cpp's filters such as `map` make lists
        value = list(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _make_environment() -> _Sandbox:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # constants are then computed when a template is rendered, and not when it is compiled
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


ENVIRONMENT = _make_environment()
# Errors of compilation for an invalid template; the last three are Python's, for a template that is nested too deeply.
NOT_COMPILED = (TemplateError, SyntaxError, RecursionError, ValueError)

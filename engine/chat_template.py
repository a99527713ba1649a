"""A conversation to the one text a model was trained on, by the checkpoint's own Jinja template.

Templates come with checkpoints, so they are code from elsewhere: they run in Jinja's immutable sandbox and see plain JSON values only. The
environment (trimmed blocks, `raise_exception`, `strftime_now`, a `tojson` that leaves HTML alone, `{% generation %}`, break and continue) is
the one templates are written against. The module refuses to know tokens and HTTP.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.tokenizer import TokenizerError, read_json, special_tokens_of

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class ChatTemplateError(Exception):
    """The template refuses the conversation, or there is none; the message is a sentence for the user."""


class ChatTemplate:
    """One model's template, or its named templates: `tool_use` is taken when tools are listed, `default` otherwise."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self.sources = sources
        try:
            self._templates = {name: _environment.from_string(source) for name, source in sources.items()}
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template is not valid Jinja: {error}") from None

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate":
        """Files win over tokenizer_config.json, as in transformers. A model without any template can still complete texts."""
        try:
            config = read_json(directory / "tokenizer_config.json")
            sources = _named_templates(config.get("chat_template"))
            main = directory / "chat_template.jinja"
            if main.is_file():
                sources["default"] = main.read_text(encoding="utf-8")
            for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = extra.read_text(encoding="utf-8")
        except (TokenizerError, OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(str(error)) from None
        return cls(sources, special_tokens_of(config))

    def render(self, messages: Messages, tools: Tools | None = None, *, add_generation_prompt: bool = True) -> str:
        try:
            text: str = self._choose(tools).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
            return text
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses this conversation: {error}") from None
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            # A template written for other messages fails like any program: say so instead of failing the server.
            raise ChatTemplateError(f"the model's chat template cannot render this conversation: {error}") from None

    def mentions(self, text: str) -> bool:
        return any(text in source for source in self.sources.values())

    def _choose(self, tools: Tools | None) -> Any:
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError("this model has no chat template; use the completions endpoint with a text prompt")
        return self._templates[name]


def _named_templates(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (TypeError, KeyError):
        message = "chat_template in tokenizer_config.json must be a string or a list of {name, template}"
        raise ChatTemplateError(message) from None


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


_environment = _make_environment()

"""A conversation to the one text a model was trained on, by the checkpoint's own Jinja template.

Jinja takes 26 ms to import and a few more to compile a template, and a site that has just been started has better things to do: both happen when
`compile` is called, or the first conversation comes. What templates see is template_environment.py's. The module refuses to know tokens and HTTP.
"""

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import TokenizerError
from engine.tokenizer import read_json, special_tokens_of

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class ChatTemplateError(Exception):
    """The template refuses the conversation, or there is none; the message is a sentence for the user."""


class BrokenTemplateError(ChatTemplateError):
    """The template cannot be used with any conversation: the model's fault, not the user's."""


class ChatTemplate:
    """One model's template, or its named templates: `tool_use` is taken when tools are listed, `default` otherwise. For several threads."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self.sources = sources
        self.why_broken: str | None = None  # known once it has been compiled
        self._templates: dict[str, Template] | None = None if sources else {}
        self._compiling = threading.Lock()

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate":
        """Read the templates. Files win over tokenizer_config.json, as in transformers. A model without any template can still complete texts."""
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

    @property
    def is_compiled(self) -> bool:
        """Tell whether the template is compiled, known to be broken, or not there: in each case `render` takes no longer than it must."""
        return self._templates is not None or self.why_broken is not None

    def compile(self) -> None:
        """Compile the template, once for all threads. Raises BrokenTemplateError."""
        with self._compiling:
            if not self.is_compiled:
                self._compile()
        if self.why_broken is not None:
            raise BrokenTemplateError(self.why_broken)

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation. `variables`: further ones that the template may read. Raises ChatTemplateError."""
        self.compile()
        template = self._choose(tools)
        from jinja2 import TemplateError

        try:
            text: str = template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**(variables or {}), **self._special_tokens},
            )
            return text
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses this conversation: {error}") from None
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            # A template written for other messages fails like any program: say so instead of failing the server.
            raise ChatTemplateError(f"the model's chat template cannot render this conversation: {error}") from None

    def mentions(self, text: str) -> bool:
        return any(text in source for source in self.sources.values())

    def _compile(self) -> None:
        from engine.template_environment import ENVIRONMENT, NOT_COMPILED

        try:
            self._templates = {name: ENVIRONMENT.from_string(source) for name, source in self.sources.items()}
        except NOT_COMPILED as error:
            self.why_broken = f"the model's chat template is not valid Jinja: {error}"

    def _choose(self, tools: Tools | None) -> "Template":
        assert self._templates is not None
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


def import_ahead() -> None:
    """Begin to import Jinja in a thread: a conversation that waits for its model will need both."""
    if "engine.template_environment" not in sys.modules:
        threading.Thread(target=_import_environment, name="import jinja", daemon=True).start()


def _import_environment() -> None:
    import engine.template_environment  # noqa: F401

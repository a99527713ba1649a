"""The rendering of a conversation to a prompt, by the Jinja template of a model's checkpoint.

Importing Jinja takes 26 ms, and compiling a template a few more. A starting site needs this time for other work, so both happen when `compile` is
called, or at the first conversation. template_environment.py defines which functions and tags templates can use. This module is independent of tokens
and HTTP.
"""

import json
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.plain_files import read_text
from pilotlight.engine.text.content_parts import lost_place, lost_places, part_roles, with_parts
from pilotlight.engine.tokenizer.tokenizer import read_json, read_special_tokens

if TYPE_CHECKING:
    from jinja2 import Template

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]

_MOST_CHARACTERS = 32 << 20  # most characters that a child process returns; a request body of 8 MiB makes fewer
_MOST_COMPILED = 16  # number of templates that a child process caches
_WORDS = 1000  # most characters of a template's error in our message


class ChatTemplateError(Exception):
    """The template refuses a conversation, or there is no template; the message is for the user."""


class BrokenTemplateError(ChatTemplateError):
    """The template fails for every conversation, which is the model's fault and not the user's."""


class ChatTemplate:
    """A model's chat template, or its named templates; thread-safe.

    The template `tool_use` is used for conversations with tools, `default` for other conversations.
    """

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self.sources = sources
        self.why_broken: str | None = None  # the error, if `compile` has failed
        self._templates: dict[str, Template] | None = None if sources else {}
        # By template, the roles whose content it expects as a list of parts.
        self._part_roles: dict[str, frozenset[str]] = {}
        # By template and whether tools are declared, the places whose messages it omits.
        self._lost: dict[tuple[str, bool], frozenset[str]] = {}
        self._compiling = threading.Lock()

    @classmethod
    def from_directory(cls, directory: Path) -> "ChatTemplate":
        """Read the templates of a checkpoint. Raises ChatTemplateError.

        Template files take precedence over tokenizer_config.json, as in transformers. A model without a template can still complete texts.
        """
        try:
            config = read_json(directory / "tokenizer_config.json")
            sources = _named_templates(config.get("chat_template"))
            main = directory / "chat_template.jinja"
            if main.exists():
                sources["default"] = read_text(main)
            for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = read_text(extra)
            return cls(sources, read_special_tokens(directory))
        except (TokenizerError, OSError, UnicodeDecodeError) as error:
            raise ChatTemplateError(str(error)) from None

    @property
    def is_compiled(self) -> bool:
        """True if the template is compiled, known to be broken, or missing, so that `render` need not compile."""
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
        """Render a conversation. `variables`: further variables of the template. Raises ChatTemplateError."""
        self.compile()
        name = self._choose(tools)
        assert self._templates is not None
        if place := lost_place(messages, self._lost[name, bool(tools)]):
            raise ChatTemplateError(f"the model's chat template leaves out {place}; send none")
        from jinja2 import TemplateError

        try:
            text: str = self._templates[name].render(
                messages=_copied(with_parts(messages, self._part_roles[name])),
                tools=_copied(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **_copied({**(variables or {}), **self._special_tokens}),
            )
            return text
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses this conversation: {_brief(error)}") from None
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError) as error:
            # A template may fail on messages that it does not expect: report that to the user, not as a server error.
            raise ChatTemplateError(
                f"the model's chat template cannot render this conversation: {_brief(error)}"
            ) from None

    def mentions(self, text: str) -> bool:
        return any(text in source for source in self.sources.values())

    @cached_property
    def as_json(self) -> str:
        """The template as an argument of `render_template`."""
        return json.dumps([self.sources, self._special_tokens])

    def _compile(self) -> None:
        from pilotlight.engine.text.template_environment import ENVIRONMENT, NOT_COMPILED

        try:
            templates = {name: ENVIRONMENT.from_string(source) for name, source in self.sources.items()}
        except NOT_COMPILED as error:
            self.why_broken = f"the model's chat template is not valid Jinja: {_brief(error)}"
            return
        special = self._special_tokens
        self._part_roles = {name: part_roles(template, special) for name, template in templates.items()}
        self._lost = {
            (name, with_tools): lost_places(template, special, self._part_roles[name], with_tools=with_tools)
            for name, template in templates.items()
            for with_tools in (False, True)
        }
        self._templates = templates

    def _choose(self, tools: Tools | None) -> str:
        assert self._templates is not None
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatTemplateError("this model has no chat template; use the completions endpoint with a text prompt")
        return name


def check_template(template: str) -> None:
    """Compile `ChatTemplate.as_json`; to be called in a child process. Raises BrokenTemplateError."""
    _template(template).compile()


def render_template(
    template: str, messages: Messages, tools: Tools | None, adds_prompt: bool, variables: Mapping[str, Any]
) -> str:
    """Render a conversation; to be called in a child process. Raises ChatTemplateError."""
    text = _template(template).render(messages, tools, add_generation_prompt=adds_prompt, variables=variables)
    if len(text) > _MOST_CHARACTERS:
        raise ChatTemplateError(
            f"the model's chat template renders this conversation to {len(text)} characters; shorten it"
        )
    return text


@lru_cache(_MOST_COMPILED)
def _template(template: str) -> ChatTemplate:
    return ChatTemplate(*json.loads(template))


def _copied(value: Any) -> Any:
    """Return a copy of a JSON value, because templates can change lists."""
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list | tuple) else value


def _brief(error: Exception) -> str:
    return str(error)[:_WORDS]


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
    """Start to import Jinja in a thread, while a conversation waits for its model."""
    if "pilotlight.engine.text.template_environment" not in sys.modules:
        threading.Thread(target=import_environment, name="import jinja", daemon=True).start()


def import_environment() -> None:
    import pilotlight.engine.text.template_environment  # noqa: F401

"""A model's format of answers: reasoning, tool calls, and the markers that separate them from text."""

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any

from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.formats.format_registry import FORMATS, ToolFormat, think_tags_of, tool_format_of
from pilotlight.engine.text.formats.grammars import Grammar
from pilotlight.engine.text.formats.markers import Markers
from pilotlight.engine.text.formats.parser import AnswerParser, Reader, plain
from pilotlight.engine.text.formats.parts import AnswerRules, Speller, Thinking
from pilotlight.engine.text.formats.scanner import Reading, Scanner
from pilotlight.engine.text.formats.tools import hermes
from pilotlight.engine.text.formats.tools import thinking as thinking_tags
from pilotlight.engine.text.formats.tools.thinking import ThinkTags
from pilotlight.engine.tokenizer.tokenizer import Tokenizer

ENDING = 16  # number of a prompt's last tokens that are searched for the tags of reasoning


class AnswerFormat:
    def __init__(self, tokenizer: Tokenizer, tools: ToolFormat | None, think: ThinkTags | None) -> None:
        self._tokenizer = tokenizer
        self.tools = tools
        self._think = None if tools is not None and tools.frames_all else think
        self._markers = Markers(tokenizer, (*(tools.tags if tools else ()), *(self._think[:2] if self._think else ())))

    @property
    def _frames_all(self) -> bool:
        return self.tools is not None and self.tools.frames_all

    @property
    def _frames_text(self) -> bool:
        return self.tools is not None and (self.tools.frames_all or self.tools.frames_text)

    @classmethod
    def of(cls, tokenizer: Tokenizer, template: ChatTemplate, tool_format: str | None = None) -> "AnswerFormat":
        """Return the format of a checkpoint's answers.

        `tool_format`: name of the format of its tool calls; None to derive the format from the template.
        """
        named = next((each for each in FORMATS if each.name == tool_format), None)
        return cls(tokenizer, named or tool_format_of(template), think_tags_of(template))

    @property
    def speller(self) -> Speller:
        """The function that writes calls of earlier messages if the template omits them."""
        return self.tools.spell if self.tools else hermes.spell

    @property
    def can_reason(self) -> bool:
        """True if answers may contain reasoning."""
        return self._think is not None or self._frames_all

    def thinking_after(self, prompt: Sequence[int], continued: str | None = None) -> Thinking:
        """Return the state of reasoning at the end of a prompt.

        `continued`: text of the assistant message that the answer continues, or None.
        """
        if self._think is None:
            return Thinking.CLOSED
        if continued is not None:
            is_open = continued.rfind(self._think.open) > continued.rfind(self._think.close)
            return Thinking.OPEN if is_open else Thinking.CLOSED
        return thinking_tags.state_of(self._markers.ending(prompt[-ENDING:]), self._think, self._markers)

    def has_reasoning(self, thinking: Thinking) -> bool:
        """Return True if an answer may start with reasoning."""
        return self._frames_all or (self._think is not None and thinking is not Thinking.CLOSED)

    @property
    def marks_calls(self) -> bool:
        """True if each call, or section of calls, starts with a token that is used for nothing else."""
        return self.tools is not None and self.tools.is_marked and self._markers.is_token(self.tools.tags[0])

    def parser(
        self, thinking: Thinking, schemas: Mapping[str, dict[str, Any]], unmarked: Container[str] = ()
    ) -> AnswerParser:
        """Return a parser. Without tools, calls are text.

        `schemas`: JSON schema of each available tool's arguments, by name. `unmarked`: tools that may be called without the format's markers, so
        without its grammar.
        """
        tools = self.tools if schemas or self._frames_text else None
        also_ends = tuple(self._markers[tag] for tag in tools.ends_thinking) if tools else ()
        reader = partial(
            _read, thinking=thinking, think=self._think, also_ends=also_ends, body=tools.read if tools else plain
        )
        return AnswerParser(self._markers, self._tokenizer.detokenizer(), reader, schemas, unmarked)

    def grammar(self, thinking: Thinking, rules: AnswerRules) -> str:
        """Return a grammar for an answer and its reasoning, in llguidance's dialect of Lark."""
        grammar = Grammar()
        before = thinking_tags.write(grammar, self._think, thinking, self._markers) if self._think else ""
        grammar.rule("start", f"{before}answer")
        if self.tools is not None and (rules.tools or self._frames_text):
            self.tools.write(grammar, rules, self._markers)
        else:
            assert rules.document is not None, "without a format there are no calls"
            grammar.rule("answer", rules.document)
        return str(grammar)


def raw_parser(tokenizer: Tokenizer) -> AnswerParser:
    """Return a parser that recognises no calls and no reasoning: everything is text."""
    return AnswerParser(Markers(tokenizer, ()), tokenizer.detokenizer(), plain, {})


def _read(
    s: Scanner, thinking: Thinking, think: ThinkTags | None, also_ends: Sequence[str], body: Reader
) -> Reading[None]:
    if think is not None:
        yield from thinking_tags.read(s, think, thinking, also_ends)
    yield from body(s)

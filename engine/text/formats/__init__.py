"""The formats of reasoning and tool calls, and the choice of a checkpoint's format. No torch, no HTTP."""

from pilotlight.engine.text.formats.answer_format import AnswerFormat, raw_parser
from pilotlight.engine.text.formats.parser import AnswerParser
from pilotlight.engine.text.formats.parts import (
    AnswerRules,
    ArgumentsPart,
    CallableTool,
    CallEndPart,
    CallPart,
    Part,
    ReasoningPart,
    Speller,
    TextPart,
    Thinking,
    merged,
)

__all__ = [
    "AnswerFormat", "AnswerParser", "AnswerRules", "ArgumentsPart", "CallEndPart", "CallPart", "CallableTool", "Part", "ReasoningPart", "Speller",
    "TextPart", "Thinking", "merged", "raw_parser",
]  # fmt: skip

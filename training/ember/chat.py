"""Converts conversations to token ids exactly as inference does: chat template, then tokenizer.

This module also marks the ids that belong to an answer, because training learns only answers.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pilotlight.engine import embedded
from pilotlight.engine.text.template_environment import ENVIRONMENT

# the folder of Ember's weights and their files, which the package ships
HERE = Path(embedded.__file__).parent / "ember"
TEMPLATE_FILE = HERE / "chat_template.jinja"
TOKENIZER_FILE = HERE / "tokenizer.json"
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, START, END)
MARKS = ("<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


_template = ENVIRONMENT.from_string(TEMPLATE_FILE.read_text(encoding="utf-8"))


def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), ask: bool = False) -> str:
    return _template.render(messages=messages, tools=tools or None, add_generation_prompt=ask)


class Chat:
    """The tokenizer and the ids of the tokens that start and end an answer."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.tokenizer = tokenizer or Tokenizer.from_file(str(TOKENIZER_FILE))
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        self.end, self.pad = vocabulary[END], vocabulary[END_OF_TEXT]
        self._opening = self.tokenizer.encode(f"{START}assistant\n", add_special_tokens=False).ids

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def prompt(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        return self.encode(render(messages, tools, ask=True))

    def lesson(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], list[bool]]:
        """Return the ids of a conversation, and which of them the assistant wrote, end tokens included."""
        ids = self.encode(render(messages, tools))
        learned = [False] * len(ids)
        opening, at = self._opening, 0
        while at < len(ids):
            if ids[at : at + len(opening)] == opening:
                at += len(opening)
                while ids[at] != self.end:
                    learned[at] = True
                    at += 1
                learned[at] = True
            at += 1
        return ids, learned

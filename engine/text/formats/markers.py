"""The markers of a format in a model's vocabulary; those that are tokens are recognised by their ids.

Parsers see such a marker as one character that no text can contain: a surrogate, which UTF-8 cannot encode. So the same letters, spelled by other
tokens, remain text. A marker that is not a token is recognised by its spelling. This module is independent of what markers mean.
"""

import json
import re
from collections.abc import Sequence

from pilotlight.engine.tokenizer.tokenizer import Detokenizer, Tokenizer

_FIRST = 0xD800
_TOKENS = re.compile("[\ud800-\udfff]")
# Tags that may also be text inside a call's string, unlike tags such as `<|call|>`.
_MARKUP = re.compile(r"</?\w+=?>?|\[/?\w+\]", re.ASCII)


class Markers:
    """A format's markers for one model; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, tags: Sequence[str]) -> None:
        found = {tag: tokenizer.added_token_id(tag) for tag in dict.fromkeys(tags)}
        self._ids = {tag: token_id for tag, token_id in found.items() if token_id is not None}
        self._written = {tag: chr(_FIRST + number) if tag in self._ids else tag for number, tag in enumerate(found)}
        self._tags = {token_id: tag for tag, token_id in self._ids.items()}
        self._spelling = {
            ord(self._written[tag]): "" if tokenizer.is_special(token_id) else tag
            for tag, token_id in self._ids.items()
        }
        self._quotable = {
            self._written[tag]
            for tag, token_id in self._ids.items()
            if _MARKUP.fullmatch(tag) and not tokenizer.is_special(token_id)
        }
        self._tokenizer = tokenizer

    def __getitem__(self, tag: str) -> str:
        """Return the marker in the form that parsers see."""
        return self._written[tag]

    def all(self) -> tuple[str, ...]:
        return tuple(self._written.values())

    def lark(self, tag: str) -> str:
        """Return the marker's literal in a grammar: its token id if it is a token, which no text can match."""
        return f"<[{self._ids[tag]}]>" if tag in self._ids else json.dumps(tag, ensure_ascii=False)

    def is_token(self, tag: str) -> bool:
        return tag in self._ids

    def push(self, detokenizer: Detokenizer, token_id: int) -> str:
        """Return the text that a token adds for parsers."""
        tag = self._tags.get(token_id)
        if tag is None:
            return detokenizer.push(token_id)
        before = detokenizer.finish()  # bytes of an unfinished character, which the marker ends
        detokenizer.push(token_id)
        return before + self._written[tag]

    def ending(self, token_ids: Sequence[int]) -> str:
        """Return the text of some tokens as parsers see it, without trailing white space."""
        detokenizer = self._tokenizer.detokenizer()
        return "".join(self.push(detokenizer, token_id) for token_id in token_ids).rstrip()

    def as_text(self, text: str) -> str:
        """Return text as a client may see it: with markers spelled out, and without special tokens."""
        return text.translate(self._spelling) if _TOKENS.search(text) else text

    def is_quotable(self, character: str) -> bool:
        """Return True if this marker token is text inside a call's string; other marker tokens end the call."""
        return character in self._quotable


def held_suffix(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `tags`."""
    longest = max(map(len, tags), default=0)
    for length in range(min(longest - 1, len(text)), 0, -1):
        end = text[-length:]
        if any(tag.startswith(end) for tag in tags):
            return length
    return 0

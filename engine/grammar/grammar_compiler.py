"""Compiles grammars with llguidance for one model's tokens; refuses those that cannot be enforced.

This module knows the library, the model's tokenizer and the limits of both, and is independent of threads, sequences and clients. A client's grammar
is compiled only after a child process has survived it (engine/grammar/grammar_check.py).
"""

import json
import re
import threading
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING

from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher
from pilotlight.engine.tokenizer.tokenizer_files import tokenizer_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MAX_LEXER_STATES = 50_000
_COMMENT_PATTERN_OR_TEXT = re.compile(r'//[^\n]*|/(?!/)(?:\\.|[^/\\\n])+/[a-z]*|"(?:\\.|[^"\\\n])*"i?')
_LISTING = re.compile(r"\n *\d+ \| ")  # the grammar's lines, which llguidance appends to its error messages


class TokenizerUnreadableError(ConstraintError):
    """The model's tokenizer cannot be used for grammars; a later attempt may find repaired files."""


class GrammarCompiler:
    """Compiles grammars over one model's vocabulary. The tokenizer is read with the first grammar."""

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: SequenceOf[int]) -> None:
        self._directory = directory
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._tags: list[str] = []  # added tokens such as <think>, which texts of a grammar must not contain
        self._lock = threading.Lock()

    def compile(self, constraint: Constraint) -> "LLMatcher":
        """Return a matcher at the start of the grammar. Raises ConstraintError."""
        from llguidance import LLMatcher

        text = grammar_of(constraint)
        # Validate without a tokenizer first: an error should not be reported 1 s later because a large tokenizer is still to be read.
        is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits())
        if is_wrong:
            raise ConstraintError(refusal(constraint, messages[0]))
        tokenizer = self.tokenizer()
        spelt = next((tag for tag in self._tags if tag in constraint.text), None)
        if spelt is not None and constraint.kind != "lark":  # the tokenizer encodes the tag as one token, never as text
            raise ConstraintError(refusal(constraint, f"it spells the token {spelt!r}"))
        if spelt is not None:
            text = LLMatcher.grammar_from_lark(with_tokens(constraint.text, self._tags))
        matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits())
        if matcher.is_error():
            raise ConstraintError(refusal(constraint, matcher.get_error()))
        return matcher

    def matcher(self, grammar: "LLMatcher", *, is_optional: bool = False) -> Matcher:
        """Return the state of a sequence at the start of a compiled grammar."""
        num_words = -(-self._vocab_size // 32)
        return Matcher(grammar.deep_copy(), num_words, self.tokenizer(), is_optional=is_optional)

    def tokenizer(self) -> "LLTokenizer":
        """Return the tokenizer, read at the first call. Raises TokenizerUnreadableError."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                try:
                    text = tokenizer_json(self._directory)
                    fields = json.loads(text)
                    # A model that was trained further may have added tokens without embeddings, for example for padding.
                    added = [token for token in fields.get("added_tokens", ()) if token["id"] < self._vocab_size]
                    if len(added) < len(fields.get("added_tokens", ())):
                        text = json.dumps({**fields, "added_tokens": added})
                    self._tokenizer = LLTokenizer(text, self._vocab_size, self._eos_token_ids or None)
                    tags = [str(token["content"]) for token in added]
                    self._tags = [tag for tag in tags if tag.startswith("<") and tag.endswith(">")]
                except Exception as error:  # a file that is missing, or that the library does not understand
                    message = f"the tokenizer of {self._directory} cannot be used for grammars: {error}"
                    raise TokenizerUnreadableError(message) from None
            return self._tokenizer


def limits() -> "LLParserLimits":
    """Return the limits for compiled grammars.

    A state of an automaton takes 1 to 2 KB, so the states of one answer may take 100 MB, instead of 500 by default. Other limits are the defaults:
    20 ms to build an automaton, 14 ms and 50,000 items for a mask.
    """
    from llguidance import LLParserLimits

    return LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)


def grammar_of(constraint: Constraint) -> str:
    """Return a constraint in the format of llguidance. Raises ConstraintError."""
    from llguidance import LLMatcher

    from pilotlight.engine.text.formats.grammars import (  # imported here: a bare GPU machine lacks msgspec
        WHITE_SPACE,
        any_of,
        asserting,
    )
    from pilotlight.engine.text.formats.schema_numbers import InexactNumberError, check_lark, check_schema

    try:
        if constraint.kind == "lark":
            check_lark(constraint.text)
    except InexactNumberError as error:
        raise ConstraintError(refusal(constraint, str(error))) from None
    match constraint.kind:
        case "json_schema":
            try:
                options = {"whitespace_pattern": WHITE_SPACE}
                schema = json.loads(constraint.text)
                check_schema(schema)
                return LLMatcher.grammar_from_json_schema(asserting(schema), defaults=options)  # type: ignore[arg-type]
            except InexactNumberError as error:
                raise ConstraintError(refusal(constraint, str(error))) from None
            except ValueError as error:
                raise ConstraintError(f"the schema cannot be read: {error}") from None
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.text)
        case "choice":
            return LLMatcher.grammar_from_regex(any_of(json.loads(constraint.text)))
        case "lark":
            return LLMatcher.grammar_from_lark(constraint.text)


def with_tokens(lark: str, tags: SequenceOf[str]) -> str:
    """Return a Lark grammar in which quoted tags such as "<think>" are replaced by tokens.

    A tokenizer that has a token for a text never spells the text with other tokens.
    """
    tag = re.compile("(" + "|".join(re.escape(tag) for tag in tags if re.fullmatch(r"<[^<>\s]+>", tag)) + ")")

    def told(found: re.Match[str]) -> str:
        quoted = found[0]
        if not (quoted.startswith('"') and quoted.endswith('"') and tag.search(quoted)):
            return quoted
        pieces = enumerate(tag.split(quoted[1:-1]))
        return "(" + " ".join(piece if i % 2 else f'"{piece}"' for i, piece in pieces if piece) + ")"

    return _COMMENT_PATTERN_OR_TEXT.sub(told, lark)


def refusal(constraint: Constraint, reason: str) -> str:
    """Return the error message for a grammar that cannot be enforced."""
    what = {"json_schema": "JSON schema", "regex": "pattern", "choice": "choice", "lark": "grammar"}[constraint.kind]
    said = _LISTING.split(reason, maxsplit=1)[0]
    return f"the {what} cannot be enforced: {' '.join(said.split())[:500]}"

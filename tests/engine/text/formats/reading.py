"""Helpers that cut answers into tokens in any way, and return what a format reads in them."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pilotlight.engine.text.formats import (
    AnswerParser,
    ArgumentsPart,
    CallEndPart,
    CallPart,
    Part,
    ReasoningPart,
    TextPart,
    Thinking,
    merged,
)
from pilotlight.engine.text.formats.answer_format import AnswerFormat
from pilotlight.engine.text.formats.format_registry import FORMATS, ToolFormat
from pilotlight.engine.text.formats.tools.thinking import TAGS as THINK_TAGS
from pilotlight.engine.text.formats.tools.thinking import ThinkTags

Chunk = bytes | str  # a token: bytes of text, or a tag
Read = tuple[str, ...]  # "text", "reasoning" or "call", followed by its content


class ChunkTokenizer:
    """A tokenizer whose vocabulary grows on demand: any run of bytes is a token, and so is each tag if tags are tokens."""

    def __init__(self, tags: Sequence[str], special: Sequence[str] = ()) -> None:
        self._chunks: list[Chunk] = list(tags)
        self._special = set(special)

    def id_of(self, chunk: Chunk) -> int:
        if chunk not in self._chunks:
            self._chunks.append(chunk)
        return self._chunks.index(chunk)

    def bytes_of(self, token_id: int) -> bytes:
        chunk = self._chunks[token_id]
        return chunk if isinstance(chunk, bytes) else b"" if chunk in self._special else chunk.encode()

    def added_token_id(self, text: str) -> int | None:
        return self._chunks.index(text) if text in self._chunks else None

    def is_special(self, token_id: int) -> bool:
        return self._chunks[token_id] in self._special

    def detokenizer(self) -> "ChunkDetokenizer":
        return ChunkDetokenizer(self)


class ChunkDetokenizer:
    def __init__(self, tokenizer: ChunkTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.bytes_of(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def held_before(self, _token_id: int) -> int:
        return 0

    @property
    def is_pending(self) -> bool:
        return bool(self._decoder.getstate()[0])


def format_of(
    name: str | None, *, tags: bool = True, special: Sequence[str] = (), think: ThinkTags | None = None
) -> tuple[AnswerFormat, ChunkTokenizer]:
    """Return a format and its tokenizer. `tags` tells whether tags are tokens."""
    tools: ToolFormat | None = next((each for each in FORMATS if each.name == name), None)
    every = (*(tools.tags if tools else ()), *(think[:2] if think else ()))
    tokenizer = ChunkTokenizer(every if tags else (), special)
    return AnswerFormat(tokenizer, tools, think), tokenizer


def chunked(text: str, tags: Iterable[str], cuts: Iterable[int] | None) -> Iterator[Chunk]:
    """Cut a text into tokens: at tags, and at the byte positions in `cuts`, or at every byte if `cuts` is None."""
    position = 0
    wanted = None if cuts is None else set(cuts)
    pattern = "|".join(map(re.escape, sorted(tags, key=len, reverse=True))) or "(?!)"
    for piece in re.split(f"({pattern})", text):
        if piece in tags:
            yield piece
            position += len(piece.encode())
            continue
        run = b""
        for byte in piece.encode():
            if run and (wanted is None or position in wanted):
                yield run
                run = b""
            run += bytes([byte])
            position += 1
        if run:
            yield run


def parts_of(parser: AnswerParser, token_ids: Iterable[int], *, is_cut: bool = False) -> tuple[Part, ...]:
    parts = [part for token_id in token_ids for part in parser.push(token_id)]
    parts += parser.finish(is_cut=is_cut)
    assert parser.num_settled == parser.num_pushed
    assert next(parser._reading, "has read all") == "has read all"
    return merged(parts)


def read(
    name: str | None,
    text: str,
    *,
    cuts: Iterable[int] | None = (),
    tags: bool = True,
    special: Sequence[str] = (),
    think: ThinkTags | None = None,
    thinking: Thinking = Thinking.CLOSED,
    schemas: dict[str, Any] | None = None,
    is_cut: bool = False,
) -> list[Read]:
    """Return the texts, reasoning and calls that a format reads in a text, which is cut as by `chunked`."""
    answers, tokenizer = format_of(name, tags=tags, special=special, think=think)
    schemas = {"f": {}} if schemas is None else schemas
    parser = answers.parser(thinking, schemas, unmarked=schemas)
    known = (*(answers.tools.tags if answers.tools else ()), *(think[:2] if think else ())) if tags else ()
    token_ids = [tokenizer.id_of(chunk) for chunk in chunked(text, known, cuts)]
    return list(told(parts_of(parser, token_ids, is_cut=is_cut)))


def told(parts: Iterable[Part]) -> Iterator[Read]:
    call: list[str] = []
    for part in parts:
        match part:
            case TextPart(text):
                yield ("text", text)
            case ReasoningPart(text):
                yield ("reasoning", text)
            case CallPart(_, name, call_id):
                call = ["call", name, ""] if call_id is None else ["call", name, "", call_id]
            case ArgumentsPart(_, text):
                call[2] += text
            case CallEndPart():
                yield tuple(call)
                call = []
    if call:
        yield ("cut", *call[1:])


def assert_same_however_cut(name: str | None, text: str, expected: list[Read], **options: Any) -> None:
    """Check that a text is read the same whole, byte by byte, and cut in two at any byte."""
    assert read(name, text, **options) == expected
    assert read(name, text, cuts=None, **options) == expected
    for cut in range(1, len(text.encode())):
        assert read(name, text, cuts=(cut,), **options) == expected, cut


__all__ = [
    "THINK_TAGS",
    "ChunkTokenizer",
    "assert_same_however_cut",
    "chunked",
    "format_of",
    "parts_of",
    "read",
    "told",
]

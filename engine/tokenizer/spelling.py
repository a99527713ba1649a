"""The bytes of tokens, by their spelling in a vocabulary, for tokenizers that decode each token alone.

This module supports byte-level BPE, and SentencePiece's word marks with byte fallback. The tokens of other tokenizers can only be decoded by the
tokenizers library.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

WORD_MARK = "\u2581"  # SentencePiece's character for a space
Spelling = Callable[[str], bytes]  # returns the bytes of a token


def _byte_level_alphabet() -> tuple[str, ...]:
    """Return GPT-2's alphabet: the character of each byte, which is above U+00FF for unprintable bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return tuple(chr(byte if byte in printable else 0x100 + others.index(byte)) for byte in range(256))


BYTE_LEVEL_ALPHABET = _byte_level_alphabet()  # character by byte
_BYTE_OF = {character: byte for byte, character in enumerate(BYTE_LEVEL_ALPHABET)}


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token with one character per byte."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:  # a token outside the alphabet is plain text
        return token.encode()


def _word_marks(token: str, has_bytes: bool) -> bytes:
    """Return the bytes of SentencePiece's spelling.

    U+2581 is a space, and <0x0A> a byte if the decoder supports that. A leading space is kept, because an answer may continue a text.
    """
    if has_bytes and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace(WORD_MARK, " ").encode()


def spelling_of(decoder: dict[str, Any] | None) -> Spelling | None:
    """Return the spelling for the `decoder` of a tokenizer.json.

    Returns None if only the library can decode the tokens.
    """
    steps = [step for step in _steps(decoder) if step.get("type") != "Fuse"]
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return _byte_level
    marks = any(_reads_word_marks(step) for step in steps)
    if marks and all(_reads_word_marks(step) or _is_harmless(step) for step in steps):
        return partial(_word_marks, has_bytes="ByteFallback" in kinds)
    return None


def _steps(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    if decoder is None:
        return
    if decoder.get("type") != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _steps(part)


def _reads_word_marks(step: dict[str, Any]) -> bool:
    if step.get("type") == "Metaspace":
        return step.get("replacement") == WORD_MARK
    return step.get("type") == "Replace" and step.get("pattern") == {"String": WORD_MARK} and step.get("content") == " "


def _is_harmless(step: dict[str, Any]) -> bool:
    """Return True for a step that converts bytes, or strips the space that tokenizers add before a text."""
    is_strip = step.get("type") == "Strip" and step.get("content") == " " and step.get("stop") == 0
    return step.get("type") == "ByteFallback" or (is_strip and step.get("start") in (0, 1))

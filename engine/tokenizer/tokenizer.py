"""Conversion between text and token ids by a checkpoint's tokenizer (read by tokenizer_files.py).

Converts a growing list of ids to text that never ends within a character: by the tokens' bytes if spelling.py knows them, else by the tokenizers
library. This module is independent of templates, stop conditions and HTTP.
"""

import asyncio
import codecs
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.plain_files import read_text
from pilotlight.engine.tokenizer.spelling import spelling_of

if TYPE_CHECKING:  # imported with the first tokenizer, while weights load, because the import takes 5 ms
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the library's threads do not help batches of one text

# Shields, which mark special tokens in a user's text. They consist of digits, which survive whatever a template does to text: JSON with or without
# escapes, Python's repr of a dict, lower case. No suffix of a shield is a prefix of a shield, so digits next to a shield do not hide it. If a
# user's text contains a shield, it is replaced by U+FFFD.
SHIELD_BEGIN, SHIELD_END = "683017942955", "951760284433"
INLINE_CHARACTERS = 4_000  # a text of at most this length is encoded without a thread: it takes about 1 ms
MAX_CHARACTER_BYTES = 4  # in UTF-8
MOST_TOKENS = 1 << 24  # the library's copy of a tokenizer takes 4 bytes for each id below the largest one
REPLACEMENT = "\ufffd".encode()  # an answer may contain this character like any other
MARKED_TOGETHER = 2_000  # special tokens marked at once, without releasing Python's lock

# Texts of several kinds with which `check_tokenizer` tests a tokenizer.
_TRIED = (
    "", "Hello, world! It's 12:34:56.", "x" * 5000, " " * 5000, "\r\n\t" * 1000, "1234567890" * 200,
    "D\u00e9j\u00e0 vu \u65e5\u672c\u8a9e \U0001f600\u200d\u0301 \u0000\uffff",
    f"{SHIELD_BEGIN}<s>{SHIELD_END}[INST]<|im_end|>",
)  # fmt: skip

_SENTENCE_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")

_SHIELDED = re.compile(f"{SHIELD_BEGIN}((?:(?!{SHIELD_BEGIN}).)*?){SHIELD_END}", re.DOTALL)

JSON = Any  # str, number, bool, None, and lists, tuples and dicts of them


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads."""

    def __init__(self, backend: "Backend", *, decoder: dict[str, Any] | None, special_tokens: dict[str, str]) -> None:
        self._backend = backend
        self._spelling = spelling_of(decoder)
        self._added = {
            token_id: (b"" if token.special else token.content.encode(), token.content)
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        self._bytes: dict[int, bytes] = {}
        self._special_text = _any_of(content for spelled, content in self._added.values() if not spelled)
        self._plain: Backend | None = None
        self.special_tokens = special_tokens  # special tokens by their names in templates: bos_token, eos_token, ...
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.num_base_tokens: int = backend.get_vocab_size(with_added_tokens=False)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        from pilotlight.engine.tokenizer.tokenizer_files import tokenizer_json

        made = cls.from_json(tokenizer_json(directory), read_special_tokens(directory), origin=str(directory))
        if read_sentence_config(directory).get("do_lower_case"):
            made._lower()
        return made

    @classmethod
    def from_json(cls, text: str, special_tokens: dict[str, str], origin: str = "tokenizer.json") -> "Tokenizer":
        from tokenizers import Tokenizer as Backend

        try:
            fields = json.loads(text)
            backend = Backend.from_str(text)
        except BaseException as error:  # the library raises Exception for all errors, and other classes for panics
            if not _is_librarys(error):
                raise
            raise TokenizerError(f"{origin} is not a tokenizer: {error}") from None
        vocabulary = fields["model"].get("vocab")  # a list if ids are indices
        if isinstance(vocabulary, dict) and (largest := max(vocabulary.values(), default=0)) >= MOST_TOKENS:
            raise TokenizerError(f"{origin} has the token id {largest}; ids must be less than {MOST_TOKENS:,}")
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, decoder=fields.get("decoder"), special_tokens=special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Encode a text. Raises TokenizerError.

        `add_special_tokens`: add the tokens that the tokenizer puts around a text, such as a BOS.
        """
        return tuple(_ids(self._backend, text, add_special_tokens))

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Encode a pair of texts, with special tokens around them. Raises TokenizerError.

        Returns the tokens, and the index of the second text's first token; 0 if the tokenizer does not distinguish the texts.
        """
        encoding = _encoding(self._backend, (first, second), True)
        types = list(encoding.type_ids)
        return tuple(encoding.ids), types.index(1) if 1 in types else 0

    def cut(self, text: str, most: int) -> str:
        """Return the longest prefix of a text with at most `most` tokens, not counting special tokens.

        It ends before a character of which some tokens do not fit. Raises TokenizerError.
        """
        try:
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        except BaseException as error:
            if not _is_librarys(error):
                raise
            raise TokenizerError(f"the text cannot be encoded: {error}") from None
        if len(encoding.ids) <= most:
            return text
        return text[: min(encoding.offsets[most - 1][1] if most else 0, encoding.offsets[most][0])]

    def encode_rendered(self, text: str, enough: int = sys.maxsize) -> tuple[int, ...]:
        """Encode a rendered template, in which special tokens are spelled out; between shields they are text.

        May stop once there are `enough` tokens.
        """
        if SHIELD_BEGIN not in text:
            return self.encode(text)
        token_ids: list[int] = []
        position = 0
        for shielded in _SHIELDED.finditer(text):  # `unmarked` drops a shield without its partner
            if len(token_ids) >= enough:
                return tuple(token_ids)
            token_ids += _ids(self._backend, unmarked(text[position : shielded.start()]), False)
            token_ids += _ids(self._plain_backend(), unmarked(shielded[1]), False)
            position = shielded.end()
        return (*token_ids, *_ids(self._backend, unmarked(text[position:]), False))

    async def encode_prompt(self, text: str, *, is_rendered: bool, enough: int = sys.maxsize) -> tuple[int, ...]:
        """Encode a prompt; a long one in a worker thread, so that other requests are not delayed."""
        rendered, plain = partial(self.encode_rendered, enough=enough), partial(self.encode, add_special_tokens=True)
        encode = rendered if is_rendered else plain
        return encode(text) if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode, text)

    def shield(self, value: JSON) -> JSON:
        """Return a conversation in which shields enclose each special token in a string.

        `encode_rendered` encodes such tokens as text: a user must not be able to end a turn or start another one. Returns `value` itself if it has no
        special tokens.
        """
        if not self._holds_special(value):
            return value
        return self._marked(value)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; empty for a special token or an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the token as readable text for lists of logprobs; special tokens are spelled out."""
        if token_id in self._added:
            return self._added[token_id][1]
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_known(self, token_id: int) -> bool:
        return self._token(token_id) is not None

    def added_token_id(self, text: str) -> int | None:
        """Return the id of the added token, special or not, with this text, or None."""
        return next((token_id for token_id, (_, content) in self._added.items() if content == text), None)

    def spelled_tag(self, text: str) -> str | None:
        """Return an added token like `<...>` that occurs in the text, or None."""
        tags = (content for _, content in self._added.values() if content.startswith("<") and content.endswith(">"))
        return next((tag for tag in tags if tag in text), None)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and not self._added[token_id][0]

    def detokenizer(self) -> "Detokenizer":
        return _LibraryDetokenizer(self) if self._spelling is None else IncrementalDetokenizer(self)

    def decode_by_library(self, token_ids: Sequence[int]) -> str:
        """Decode ids together by the library, because some tokenizers add spaces between tokens."""
        return str(self._backend.decode(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    def _lower(self) -> None:
        """Convert every text to lower case before the normalizer's other steps."""
        from tokenizers import normalizers

        own = self._backend.normalizer
        self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])

    def _plain_backend(self) -> "Backend":
        """Return a copy of the tokenizer that treats special tokens as ordinary text."""
        if self._plain is None:
            from tokenizers import Tokenizer as Backend

            try:
                plain = Backend.from_str(self._backend.to_str())
            except Exception as error:  # the library raises Exception for all errors
                raise TokenizerError(f"the tokenizer cannot be read back: {error}") from None
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain

    def _holds_special(self, value: JSON) -> bool:
        if isinstance(value, str):
            return SHIELD_BEGIN in value or SHIELD_END in value or self._special_text.search(value) is not None
        if isinstance(value, dict):
            return any(map(self._holds_special, (*value, *value.values())))
        return isinstance(value, list | tuple) and any(map(self._holds_special, value))

    def _marked(self, value: JSON) -> JSON:
        if isinstance(value, str):
            return self._marked_text(unmarked(value, "\ufffd"))
        if isinstance(value, dict):
            return {self._marked(key): self._marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._marked, value))
        return value

    def _marked_text(self, text: str) -> str:
        """Put shields around the special tokens of a text, in parts, to release Python's lock between them.

        For 8 MB of special tokens a replacement pattern would hold the lock for half a second. With a function as replacement it is held for 38 ms
        if everything is joined at once, and for 18 ms in parts.
        """
        parts, end = [], 0
        found = self._special_text.finditer(text)
        while some := list(islice(found, MARKED_TOGETHER)):
            start, end = end, some[-1].end()
            parts.append(self._special_text.sub(_shielded, text[start:end]))
        return "".join([*parts, text[end:]])

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def _spell(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id][0]
        token = self._token(token_id)
        if token is None:
            return b""
        return self.decode_by_library([token_id]).encode() if self._spelling is None else self._spelling(token)


def _ids(backend: "Backend", text: str, add_special_tokens: bool) -> list[int]:
    return list(_encoding(backend, text, add_special_tokens).ids)


def _encoding(backend: "Backend", text: str | tuple[str, str], add_special_tokens: bool) -> "Encoding":
    """Encode like `backend.encode`, but release Python's lock, which `backend.encode` would hold."""
    try:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_librarys(error):
            raise
        raise TokenizerError(f"the text cannot be encoded: {error}") from None
    found: Encoding = encoding
    return found


def _is_librarys(error: BaseException) -> bool:
    """Return True if the library raised the error.

    A panic in Rust raises a class that is not derived from Exception and cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the words, longer ones first, as shorter ones may be prefixes."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _shielded(found: re.Match[str]) -> str:
    return f"{SHIELD_BEGIN}{found[0]}{SHIELD_END}"


def surrounded(text: str, token: str, by: str) -> str:
    """Put text around each occurrence of a special token in a rendered template, but not between shields."""
    parts, position, wider = [], 0, f"{by}{token}{by}"
    for shielded in _SHIELDED.finditer(text):
        parts += [text[position : shielded.start()].replace(token, wider), shielded[0]]
        position = shielded.end()
    return "".join([*parts, text[position:].replace(token, wider)])


def unmarked(text: str, instead: str = "") -> str:
    """Replace the shields in a text by `instead`."""
    return text.replace(SHIELD_BEGIN, instead).replace(SHIELD_END, instead)


class Detokenizer(Protocol):
    """A converter of token ids to text."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """End the tokens, and return the text that was still held back."""

    def held_before(self, token_id: int) -> int:
        """Return how many held-back characters precede this token if it is pushed next.

        A token that completes a character starts where that character starts.
        """

    @property
    def is_pending(self) -> bool:
        """True if the text of the last tokens has not been returned completely."""


class IncrementalDetokenizer:
    """A converter of token ids to text; a push takes time proportional to the token's bytes.

    Bytes of an unfinished character are held back; invalid bytes become U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)

    def held_before(self, token_id: int) -> int:
        held = self._decoder.getstate()[0]
        if not held:
            return 0
        started = held + self._tokenizer.token_bytes(token_id)[:1]
        is_broken = started != REPLACEMENT and codecs.utf_8_decode(started, "replace")[0].startswith("\ufffd")
        return int(is_broken)

    @property
    def is_pending(self) -> bool:
        return bool(self._decoder.getstate()[0])


class _LibraryDetokenizer:
    """A converter of ids by the library: a token's text is what it adds to the text of the previous token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []  # the last token whose text was returned
        self._waiting: list[int] = []  # tokens whose text ends within a character

    def push(self, token_id: int) -> str:
        if self._tokenizer.is_special(token_id) or not self._tokenizer.is_known(token_id):
            return ""
        self._waiting.append(token_id)
        text = self._new_text()
        if text.endswith("\ufffd") and len(self._waiting) < MAX_CHARACTER_BYTES:
            return ""
        self._last, self._waiting = [token_id], []
        return text

    def finish(self) -> str:
        text, self._waiting = self._new_text(), []
        return text

    def held_before(self, token_id: int) -> int:
        if not self._waiting:
            return 0
        held = self._new_text()
        text = self._text_of(self._last, [*self._waiting, token_id])
        is_broken = text.startswith(held) and not text.endswith("\ufffd")
        return len(held if is_broken else held.rstrip("\ufffd"))

    @property
    def is_pending(self) -> bool:
        return bool(self._waiting)

    def _new_text(self) -> str:
        return self._text_of(self._last, self._waiting)

    def _text_of(self, before: list[int], token_ids: list[int]) -> str:
        whole = self._tokenizer.decode_by_library([*before, *token_ids])
        return whole[len(self._tokenizer.decode_by_library(before)) :]


def check_tokenizer(directory: str) -> None:
    """Read a checkpoint's tokenizer and test it. Raises TokenizerError.

    To be called in a child process, because a file may crash the library, or keep it busy forever.
    """
    tokenizer = Tokenizer.from_directory(Path(directory))
    for text in _TRIED:
        for token_ids in (tokenizer.encode(text, add_special_tokens=True), tokenizer.encode_rendered(text)):
            tokenizer.decode(token_ids)
    for token_id in (0, tokenizer.vocab_size - 1, tokenizer.vocab_size):
        tokenizer.token_text(token_id)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return a checkpoint's special tokens by name, such as bos_token. Raises TokenizerError.

    As in transformers, special_tokens_map.json takes precedence over tokenizer_config.json, but is ignored if the latter has `added_tokens_decoder`,
    as newer ones do.
    """
    config = read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_json(directory / "special_tokens_map.json")
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = config.get(key)
        content = value.get("content") if isinstance(value, dict) else value
        if isinstance(content, str):
            named[key] = content
    return named


def read_sentence_config(directory: Path) -> dict[str, Any]:
    """Return sentence-transformers' settings for the texts of an embedding model; empty for other models.

    The file's name depends on the kind of model.
    """
    return next(
        (found for kind in _SENTENCE_KINDS if (found := read_json(directory / f"sentence_{kind}_config.json"))), {}
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist. Raises TokenizerError."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return cast("dict[str, Any]", value)

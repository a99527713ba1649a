"""Text to token ids and back, by a checkpoint's tokenizer (tokenizer_files.py finds its files).

Knows how to turn a growing list of ids into text that never ends in half a character: from the tokens' bytes if spelling.py knows them, else from the
tokenizers library. Does not know templates, stop conditions and HTTP.
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
from pilotlight.engine.text.spelling import spelling_of

if TYPE_CHECKING:  # imported with the first tokenizer, while weights load: a site's start does not wait 5 ms for it
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one text need none of the library's threads

# Shields around special tokens that a user wrote. Digits survive any transformation of a template: JSON with or without escapes, Python's repr of a
# dict, lower case. No end of either shield is the start of one, so that digits beside them shift nothing; if a user wrote a shield, it is replaced by
# U+FFFD.
SHIELD_BEGIN, SHIELD_END = "683017942955", "951760284433"
INLINE_CHARACTERS = 4_000  # about 1 ms of encoding: shorter texts are not worth a switch to a thread
MAX_CHARACTER_BYTES = 4  # of UTF-8
REPLACEMENT = "\ufffd".encode()  # an answer may contain it like any other character
MARKED_TOGETHER = 2_000  # special tokens

# Texts of all kinds with which a tokenizer is tested.
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
        self.special_tokens = special_tokens  # by their names in templates: bos_token, eos_token, ...
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.num_base_tokens: int = backend.get_vocab_size(with_added_tokens=False)

    @classmethod
    def from_directory(cls, directory: Path) -> "Tokenizer":
        from pilotlight.engine.text.tokenizer_files import tokenizer_json

        made = cls.from_json(tokenizer_json(directory), read_special_tokens(directory), origin=str(directory))
        if read_sentence_config(directory).get("do_lower_case"):
            made._lower()
        return made

    @classmethod
    def from_json(cls, text: str, special_tokens: dict[str, str], origin: str = "tokenizer.json") -> "Tokenizer":
        from tokenizers import Tokenizer as Backend

        try:
            decoder = json.loads(text).get("decoder")
            backend = Backend.from_str(text)
        except BaseException as error:  # the library raises bare Exception for everything, and panics
            if not _is_librarys(error):
                raise
            raise TokenizerError(f"{origin} is not a tokenizer: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, decoder=decoder, special_tokens=special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> tuple[int, ...]:
        """Encode a text. `add_special_tokens`: add those that the tokenizer puts around a text, such as a BOS.

        Raises TokenizerError.
        """
        return tuple(_ids(self._backend, text, add_special_tokens))

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Encode two texts as one, with special tokens around them.

        Returns the tokens, and the index of the first that belongs to the second text, or 0 if the tokenizer does not distinguish the texts. Raises
        TokenizerError.
        """
        encoding = _encoding(self._backend, (first, second), True)
        types = list(encoding.type_ids)
        return tuple(encoding.ids), types.index(1) if 1 in types else 0

    def cut(self, text: str, most: int) -> str:
        """Return the longest prefix of a text with at most `most` tokens, without special ones around it.

        Raises TokenizerError.
        """
        try:
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        except BaseException as error:
            if not _is_librarys(error):
                raise
            raise TokenizerError(f"the text cannot be encoded: {error}") from None
        return text if len(encoding.ids) <= most else text[: encoding.offsets[most - 1][1] if most else 0]

    def encode_rendered(self, text: str, enough: int = sys.maxsize) -> tuple[int, ...]:
        """Encode a rendered template, which spells its special tokens itself; between shields they are text.

        May stop after `enough` tokens.
        """
        if SHIELD_BEGIN not in text:
            return self.encode(text)
        token_ids: list[int] = []
        position = 0
        for shielded in _SHIELDED.finditer(text):  # a mark without its partner is dropped
            if len(token_ids) >= enough:
                return tuple(token_ids)
            token_ids += _ids(self._backend, unmarked(text[position : shielded.start()]), False)
            token_ids += _ids(self._plain_backend(), unmarked(shielded[1]), False)
            position = shielded.end()
        return (*token_ids, *_ids(self._backend, unmarked(text[position:]), False))

    async def encode_prompt(self, text: str, *, is_rendered: bool, enough: int = sys.maxsize) -> tuple[int, ...]:
        """Encode a text, a long one in a worker thread, so that other streams keep flowing."""
        rendered, plain = partial(self.encode_rendered, enough=enough), partial(self.encode, add_special_tokens=True)
        encode = rendered if is_rendered else plain
        return encode(text) if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode, text)

    def shield(self, value: JSON) -> JSON:
        """Return a conversation's strings with special tokens marked as text for `encode_rendered`.

        A user's text must not end a turn or open another. Returns the same object if there are none.
        """
        if not self._holds_special(value):
            return value
        return self._marked(value)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; none for a special token or an unknown id."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the token as readable text for lists of logprobs; special tokens by name."""
        if token_id in self._added:
            return self._added[token_id][1]
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_known(self, token_id: int) -> bool:
        return self._token(token_id) is not None

    def added_token_id(self, text: str) -> int | None:
        """Return the added token, special or not, with this text, or None."""
        return next((token_id for token_id, (_, content) in self._added.items() if content == text), None)

    def spelled_tag(self, text: str) -> str | None:
        """Return an added token that occurs in the text and looks like markup, or None."""
        tags = (content for _, content in self._added.values() if content.startswith("<") and content.endswith(">"))
        return next((tag for tag in tags if tag in text), None)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and not self._added[token_id][0]

    def detokenizer(self) -> "Detokenizer":
        return _LibraryDetokenizer(self) if self._spelling is None else IncrementalDetokenizer(self)

    def decode_by_library(self, token_ids: Sequence[int]) -> str:
        """Decode with the library, which uses all ids: tokens joined by spaces have no separate bytes."""
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
        """Return the same tokenizer with special tokens treated as ordinary text."""
        if self._plain is None:
            from tokenizers import Tokenizer as Backend

            try:
                plain = Backend.from_str(self._backend.to_str())
            except Exception as error:  # as above
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
        """Mark special tokens in a text, in parts and by a function, to release Python's lock between them.

        For 8 MB of special tokens a pattern would hold it for half a second; joining everything at once would hold it for 38 ms, in parts it takes
        18.
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
        return self.decode_by_library([token_id]).encode() if self._spelling is None else self._spelling.to_bytes(token)


def _ids(backend: "Backend", text: str, add_special_tokens: bool) -> list[int]:
    return list(_encoding(backend, text, add_special_tokens).ids)


def _encoding(backend: "Backend", text: str | tuple[str, str], add_special_tokens: bool) -> "Encoding":
    """Encode like `backend.encode`, but without Python's lock, which that holds in any thread."""
    try:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_librarys(error):
            raise
        raise TokenizerError(f"the text cannot be encoded: {error}") from None
    found: Encoding = encoding
    return found


def _is_librarys(error: BaseException) -> bool:
    """True if the library raised the error.

    A panic of Rust arrives as a class that is no Exception, and that cannot be imported.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Match any of the words, longer ones first, because shorter ones may be their prefixes."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _shielded(found: re.Match[str]) -> str:
    return f"{SHIELD_BEGIN}{found[0]}{SHIELD_END}"


def unmarked(text: str, instead: str = "") -> str:
    """Return a shielded text as its author wrote it."""
    return text.replace(SHIELD_BEGIN, instead).replace(SHIELD_END, instead)


class Detokenizer(Protocol):
    """A converter of token ids to text."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """Return the text that was still held back when the tokens ended."""

    def held_before(self, token_id: int) -> int:
        """Return how many held-back characters precede this token, if it is the next.

        A token that completes a character starts where that starts.
        """

    @property
    def is_pending(self) -> bool:
        """True if the last tokens' text is not completely delivered yet."""


class IncrementalDetokenizer:
    """A converter of token ids to text, each push in O(its own bytes).

    Bytes of an unfinished character wait; invalid ones become U+FFFD.
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
    """A converter of ids by the library: a token's text is what it adds to that of its predecessor."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []  # tokens whose text was returned
        self._waiting: list[int] = []  # tokens whose text ends in half a character

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
    """Read a checkpoint's tokenizer and use it as a site does.

    For a child process, because a file may crash the library, or keep it busy forever. Raises TokenizerError.
    """
    tokenizer = Tokenizer.from_directory(Path(directory))
    for text in _TRIED:
        for token_ids in (tokenizer.encode(text, add_special_tokens=True), tokenizer.encode_rendered(text)):
            tokenizer.decode(token_ids)
    for token_id in (0, tokenizer.vocab_size - 1, tokenizer.vocab_size):
        tokenizer.token_text(token_id)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return a checkpoint's named special tokens, each written as a string or an object with `content`.

    As in transformers, special_tokens_map.json takes precedence over tokenizer_config.json, but is ignored if that has `added_tokens_decoder`, as
    newer ones do. Raises TokenizerError.
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
    """Read sentence-transformers' settings of an embedding model's texts; empty for other models.

    Different versions use different file names.
    """
    return next(
        (found for kind in _SENTENCE_KINDS if (found := read_json(directory / f"sentence_{kind}_config.json"))), {}
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file; empty when there is no file."""
    try:
        value = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return cast("dict[str, Any]", value)

"""Text to token ids and back, by a checkpoint's tokenizer (tokenizer_files.py says which files it may be in).

Knows how to turn a growing list of ids into text that never ends in half a character: from the tokens' bytes where spelling.py knows them, else from
what the tokenizers library decodes. Refuses to know templates, stop conditions and HTTP.
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

if TYPE_CHECKING:  # imported with the first tokenizer, beside its weights: a site's start does not wait 5 ms for it
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # batches of one text need no threads of the library's own

# Round special tokens that a user wrote. Digits come through whatever a template does to text: JSON with or without escapes, Python's own way of
# writing a dict, lower case. No end of either is the beginning of one, so that digits beside them move nothing; where a user wrote one of them, it
# is replaced by U+FFFD.
SHIELD_BEGIN, SHIELD_END = "683017942955", "951760284433"
INLINE_CHARACTERS = 4_000  # about 1 ms of encoding: shorter texts are not worth a thread's hand-over
MAX_CHARACTER_BYTES = 4  # of UTF-8
REPLACEMENT = "\ufffd".encode()  # that an answer may hold as any other character
MARKED_TOGETHER = 2_000  # special tokens

# Texts of all kinds that a tokenizer is tried with.
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
        self.special_tokens = special_tokens  # as templates call them: bos_token, eos_token, ...
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
        """Encode a text. `add_special_tokens`: with the tokenizer's own round the text, such as a BOS. Raises TokenizerError."""
        return tuple(_ids(self._backend, text, add_special_tokens))

    def encode_pair(self, first: str, second: str) -> tuple[tuple[int, ...], int]:
        """Encode two texts as one, with the tokenizer's own special tokens round them. Return the tokens, and which of them is the first that the
        tokenizer counts to the second text; 0 if it does not tell them apart. Raises TokenizerError."""
        encoding = _encoding(self._backend, (first, second), True)
        types = list(encoding.type_ids)
        return tuple(encoding.ids), types.index(1) if 1 in types else 0

    def cut(self, text: str, most: int) -> str:
        """Return the beginning of a text that has at most so many tokens, without special ones round it. Raises TokenizerError."""
        try:
            [encoding] = self._backend.encode_batch([text], add_special_tokens=False)
        except BaseException as error:
            if not _is_librarys(error):
                raise
            raise TokenizerError(f"the text cannot be encoded: {error}") from None
        return text if len(encoding.ids) <= most else text[: encoding.offsets[most - 1][1] if most else 0]

    def encode_rendered(self, text: str, enough: int = sys.maxsize) -> tuple[int, ...]:
        """Encode a rendered template, which spells its special tokens itself. Between shields they are text. With `enough` tokens it may stop."""
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
        """Return a conversation's strings with their special tokens marked, so that `encode_rendered` takes those as the text they are: what a user
        writes must not end a turn or open another. Without any, it is the very same value."""
        if not self._holds_special(value):
            return value
        return self._marked(value)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text: nothing for a special token or an id outside the vocabulary."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._spell(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the token as a person would want to read it in a list of logprobs; special tokens by name."""
        if token_id in self._added:
            return self._added[token_id][1]
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_known(self, token_id: int) -> bool:
        return self._token(token_id) is not None

    def added_token_id(self, text: str) -> int | None:
        """Return the token of this text that was added to the vocabulary, special or not; None: there is none."""
        return next((token_id for token_id, (_, content) in self._added.items() if content == text), None)

    def spelled_tag(self, text: str) -> str | None:
        """Return an added token that the text spells, and that looks like markup; None: there is none."""
        tags = (content for _, content in self._added.values() if content.startswith("<") and content.endswith(">"))
        return next((tag for tag in tags if tag in text), None)

    def is_special(self, token_id: int) -> bool:
        return token_id in self._added and not self._added[token_id][0]

    def detokenizer(self) -> "Detokenizer":
        return _LibraryDetokenizer(self) if self._spelling is None else IncrementalDetokenizer(self)

    def decode_by_library(self, token_ids: Sequence[int]) -> str:
        """Decode as the library does, which looks at all ids: tokens that it joins by spaces have no bytes of their own."""
        return str(self._backend.decode(token_ids))

    def decode(self, token_ids: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.finish()

    def _lower(self) -> None:
        """Lower every text before all else that the normalizer does."""
        from tokenizers import normalizers

        own = self._backend.normalizer
        self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *([own] if own else [])])

    def _plain_backend(self) -> "Backend":
        """Return the same tokenizer, to which special tokens are text like any other."""
        if self._plain is None:
            from tokenizers import Tokenizer as Backend

            try:
                plain = Backend.from_str(self._backend.to_str())
            except Exception as error:  # as above
                raise TokenizerError(f"the tokenizer cannot be read as it writes itself: {error}") from None
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
        """With a function, as Python's lock can be had between two of its calls: of 8 MB of special tokens a pattern would keep it for half a second.
        In parts, since what joins them keeps it, too: for 38 ms, were it one, and now for 18."""
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
    """Encode as `backend.encode`, which keeps Python's lock, in whatever thread it is called: 7 MiB of spaces would stop every stream for 15 s.
    Two texts are a pair."""
    try:
        [encoding] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    except BaseException as error:
        if not _is_librarys(error):
            raise
        raise TokenizerError(f"the text cannot be encoded: {error}") from None
    found: Encoding = encoding
    return found


def _is_librarys(error: BaseException) -> bool:
    """Tell whether the library raised it. A panic of Rust arrives as a class that is no Exception, and that cannot be imported."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Match any of the words, longer ones first: they win over the shorter ones they begin with."""
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def _shielded(found: re.Match[str]) -> str:
    return f"{SHIELD_BEGIN}{found[0]}{SHIELD_END}"


def unmarked(text: str, instead: str = "") -> str:
    """Return a shielded text as its author wrote it."""
    return text.replace(SHIELD_BEGIN, instead).replace(SHIELD_END, instead)


class Detokenizer(Protocol):
    """Turns token ids into text."""

    def push(self, token_id: int) -> str: ...

    def finish(self) -> str:
        """Return the text that was still held back when the tokens ended."""

    def held_before(self, token_id: int) -> int:
        """Return how many characters of the text held back stand before this token, if it is the next. One that goes on with a character begins
        where that does."""

    @property
    def is_pending(self) -> bool:
        """Tell whether the last tokens' text is not wholly delivered yet."""


class IncrementalDetokenizer:
    """Turns token ids into text, each push O(its own bytes). Bytes of an unfinished character wait; bytes that can become none are U+FFFD."""

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
        begun = held + self._tokenizer.token_bytes(token_id)[:1]
        is_broken = begun != REPLACEMENT and codecs.utf_8_decode(begun, "replace")[0].startswith("\ufffd")
        return int(is_broken)

    @property
    def is_pending(self) -> bool:
        return bool(self._decoder.getstate()[0])


class _LibraryDetokenizer:
    """Turns ids into text by what each token adds to the text of the one before it, as the library decodes them together."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._last: list[int] = []  # whose text is out
        self._waiting: list[int] = []  # whose text ends in half a character

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
    """Read a checkpoint's tokenizer and use it as a site does. For a child process: a file may crash the library, or keep it busy for ever. Raises
    TokenizerError."""
    tokenizer = Tokenizer.from_directory(Path(directory))
    for text in _TRIED:
        for token_ids in (tokenizer.encode(text, add_special_tokens=True), tokenizer.encode_rendered(text)):
            tokenizer.decode(token_ids)
    for token_id in (0, tokenizer.vocab_size - 1, tokenizer.vocab_size):
        tokenizer.token_text(token_id)


def read_special_tokens(directory: Path) -> dict[str, str]:
    """Return a checkpoint's named special tokens, each written as a string or an object with `content`. As in transformers special_tokens_map.json
    wins over tokenizer_config.json, but is not read if that has `added_tokens_decoder`, as newer ones do. Raises TokenizerError."""
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
    """Read what sentence-transformers wrote of an embedding model's texts, under the name of whichever version; empty for other models."""
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

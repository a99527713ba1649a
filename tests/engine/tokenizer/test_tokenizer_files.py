"""Mistral's tekken.json and Kimi's tiktoken.model, written in their published layouts: results equal those of tiktoken."""

import base64
import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.engine.tokenizer.tokenizer_files import KIMI_PATTERN, TEKKEN_SPECIAL

tiktoken: Any = pytest.importorskip("tiktoken")  # a GPU machine may lack it
TEKKEN_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = (
    "the cat sat on the mat, and that is that: ababababa abaabaaba aaaaaaaa nanana banana Don't we'll I'VE 1234567890 "
    "d\u00e9j\u00e0 vu \u65e5\u672c\u8a9e\u65e5\u672c \u4e2d\u6587abc \U0001f600\U0001f603 x = 10 == 100 "
    "\r\n\r\n\t\tif (a) { b(); }\n\n    return 0;\n"
)
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(re.findall(r"\s+|\w|[^\w\s]", CORPUS)), max_size=40).map("".join))
NUM_SPECIAL = 30


def trained() -> dict[bytes, int]:
    """Return ranks from byte-pair training: the most frequent pair becomes a token, until each word is one token."""
    ranks = {bytes([byte]): rank for rank, byte in enumerate(random.Random(0).sample(range(256), 256))}
    words = [[bytes([byte]) for byte in word.encode()] for word in re.findall(r"\s*\S+|\s+", CORPUS)]
    while counts := Counter(left + right for word in words for left, right in pairwise(word)):
        token = max(counts, key=lambda token: (counts[token], token))
        ranks.setdefault(token, len(ranks))
        words = [joined(word, token) for word in words]
    return ranks


def joined(word: list[bytes], token: bytes) -> list[bytes]:
    made: list[bytes] = []
    for part in word:
        if made and made[-1] + part == token:
            made[-1] = token
        else:
            made.append(part)
    return made


RANKS = trained()
TEKKEN_CONFIG = {
    "pattern": TEKKEN_PATTERN, "num_vocab_tokens": len(RANKS), "default_vocab_size": len(RANKS) - 20 + NUM_SPECIAL,
    "default_num_special_tokens": NUM_SPECIAL, "version": "v3",
}  # fmt: skip


def write_kimi(directory: Path, ranks: dict[bytes, int] = RANKS, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    (directory / "tiktoken.model").write_text("".join(lines))
    first = len(ranks)
    added = {"[BOS]": True, "[EOS]": True, "<|im_end|>": True, "<think>": False}
    fields = {
        "tokenizer_class": "TikTokenTokenizer",
        "eos_token": "[EOS]",
        "added_tokens_decoder": {
            str(first + i): {"content": text, "special": is_special}
            for i, (text, is_special) in enumerate(added.items())
        },
    }
    (directory / "tokenizer_config.json").write_text(json.dumps({**fields, **config}))
    return directory


def write_tekken(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    (directory / "tekken.json").write_text(json.dumps({"config": TEKKEN_CONFIG, "vocab": vocabulary, **changes}))
    return directory


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write_kimi(tmp_path_factory.mktemp("kimi")))


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_directory(write_tekken(tmp_path_factory.mktemp("tekken")))


KIMI = tiktoken.Encoding("kimi", pat_str=KIMI_PATTERN, mergeable_ranks=RANKS, special_tokens={})
CUT = {
    token: rank for token, rank in RANKS.items() if rank < len(RANKS) - 20
}  # the file states how many ranks are used
TEKKEN = tiktoken.Encoding("tekken", pat_str=TEKKEN_PATTERN, mergeable_ranks=CUT, special_tokens={})


@pytest.mark.long
@given(text=TEXTS)
@settings(max_examples=400)
def test_kimis_ids_are_tiktokens(kimi: Tokenizer, text: str) -> None:
    assert list(kimi.encode(text)) == KIMI.encode_ordinary(text)


@given(text=TEXTS)
@settings(max_examples=400)
def test_mistrals_ids_are_tiktokens_after_the_special_ones(tekken: Tokenizer, text: str) -> None:
    assert list(tekken.encode(text)) == [token + NUM_SPECIAL for token in TEKKEN.encode_ordinary(text)]


@given(token_ids=st.lists(st.integers(0, len(RANKS) - 1), max_size=30))
def test_any_ids_decode_to_the_bytes_that_their_file_has(kimi: Tokenizer, token_ids: list[int]) -> None:
    assert b"".join(map(kimi.token_bytes, token_ids)) == KIMI.decode_bytes(token_ids)
    assert kimi.decode(token_ids) == KIMI.decode(token_ids)


@pytest.mark.long
@given(text=st.text(alphabet="ab", max_size=24))
def test_the_left_of_two_overlapping_joins_is_taken(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """The token "aba" can be formed as ab|a and as a|ba."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for token in (b"ab", b"ba", b"aba", b"bab", b"abab", b"baba", b"ababa", b"babab"):
        ranks[token] = len(ranks)
    directory = write_kimi(tmp_path_factory.getbasetemp() / "ab", ranks)
    expected = tiktoken.Encoding("ab", pat_str=KIMI_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert list(Tokenizer.from_directory(directory).encode(text)) == expected.encode_ordinary(text)


def test_special_tokens_have_their_ids_and_reserved_ones_their_names(kimi: Tokenizer, tekken: Tokenizer) -> None:
    first = len(RANKS)
    assert kimi.encode("a<|im_end|><think>") == (RANKS[b"a"], first + 2, first + 3)
    assert (kimi.is_special(first + 2), kimi.is_special(first + 3)) == (True, False)
    assert kimi.decode(kimi.encode("a<|im_end|><think>")) == "a<think>"
    assert kimi.token_text(first + 4) == f"<|reserved_token_{first + 4}|>"
    assert kimi.vocab_size == kimi.num_base_tokens == first + 256
    assert kimi.special_tokens == {"eos_token": "[EOS]"}
    assert tekken.encode("[INST]a[/INST]") == (3, RANKS[b"a"] + NUM_SPECIAL, 4)
    assert tekken.encode("a", add_special_tokens=True) == (TEKKEN_SPECIAL.index("<s>"), RANKS[b"a"] + NUM_SPECIAL)
    assert tekken.token_text(NUM_SPECIAL - 1) == f"<SPECIAL_{NUM_SPECIAL - 1}>"
    assert tekken.vocab_size == len(RANKS) - 20 + NUM_SPECIAL


def test_special_tokens_that_a_file_names_are_its_own(tmp_path: Path) -> None:
    named = [
        {"rank": 0, "token_str": "<unk>", "is_control": True},
        {"rank": 1, "token_str": "[THINK]", "is_control": False},
    ]
    tokenizer = Tokenizer.from_directory(write_tekken(tmp_path, special_tokens=named))
    assert tokenizer.encode("[THINK]") == (1,)
    assert tokenizer.decode([0, 1, 2]) == "[THINK]"
    assert tokenizer.token_text(2) == "<SPECIAL_2>"
    assert tokenizer.encode("a", add_special_tokens=True) == tokenizer.encode("a"), "the file defines no first token"


def test_answers_follow_grammars_by_such_a_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    write_kimi(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    grammars = Grammars(GrammarCompiler(tmp_path, tokenizer.vocab_size, (len(RANKS) + 1,)))
    try:
        matcher = grammars.compile(Constraint("choice", '["that mat"]')).result(60)
        for token_id in tokenizer.encode("that mat"):
            matcher.accept(token_id)
        allowed = [
            token_id for token_id in range(tokenizer.vocab_size) if matcher.mask()[token_id // 32] >> token_id % 32 & 1
        ]
        assert allowed == [len(RANKS) + 1], "only the end may follow"
    finally:
        grammars.close()


def test_invalid_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing; .* or tekken\.json, or tiktoken\.model"):
        Tokenizer.from_directory(tmp_path)
    spoilt: list[tuple[Path, str]] = [
        (write_kimi(tmp_path / "class", tokenizer_class="QWenTokenizer"), "QWenTokenizer"),
        (write_kimi(tmp_path / "gap", {**RANKS, b"the dog": 9999}), "ranks are not 0, 1, 2"),
        (write_kimi(tmp_path / "twice", added_tokens_decoder={"600": {"content": "a"}}), "special token and an ordinary one"),
        (write_tekken(tmp_path / "config", config={}), "default_num_special_tokens"),
        (write_tekken(tmp_path / "bytes", vocab=[{"rank": 0, "token_bytes": "?", "token_str": "?"}]), "is not a tokenizer"),
        (write_tekken(tmp_path / "list", vocab=3), "is not a tokenizer"),
        (write_tekken(tmp_path / "special", config={**TEKKEN_CONFIG, "default_num_special_tokens": 10**9}), "special_tokens = 1000000000"),
        (write_tekken(tmp_path / "pattern", config={**TEKKEN_CONFIG, "pattern": "("}), "is not a tokenizer"),
    ]  # fmt: skip
    for directory, reason in spoilt:
        with pytest.raises(TokenizerError, match=reason):
            Tokenizer.from_directory(directory)
    (write_kimi(tmp_path / "bare") / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError):
        Tokenizer.from_directory(tmp_path / "bare")

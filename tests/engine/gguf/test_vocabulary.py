"""Tokenizers made from the metadata of a GGUF file give the same ids as the original tokenizers."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.metadata import Metadata
from pilotlight.engine.gguf.vocabulary import read_vocabulary
from pilotlight.engine.tokenizer.tokenizer import Tokenizer

TEXTS = (
    "the cat sat on the mat, and that is that: ababababa nanana banana Don't we'll I'VE 1234567890 d\u00e9ja\u0300 vu \u65e5\u672c\u8a9e abc",
    "x = 10 == 100 \r\n\r\n\t\tif (a) { b(); }\n\n    return 0;\n", "", " ", "  two  spaces ", "\U0001f600\U0001f603!!\n",
)  # fmt: skip
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
# The regular expressions in the tokenizer.json files of Llama 3 and Qwen 2.
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# Those of gpt-oss and DeepSeek-V3.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
)


def split(*patterns: str) -> pre_tokenizers.PreTokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(each), "isolated") for each in patterns), level])


def metadata(**values: Any) -> Metadata:
    found = {f"tokenizer.ggml.{key}": value for key, value in values.items()}
    return Metadata({"general.architecture": "llama", **found}, "tiny.gguf")


def of(read: Metadata) -> Tokenizer:
    found = read_vocabulary(read)
    assert found is not None
    return Tokenizer.from_json(found.tokenizer_json, {})


@pytest.mark.parametrize(
    ("pre", "cut", "ignores_merges"),
    [
        ("gpt-2", GPT2, False),
        ("smollm", pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]), False),
        ("llama-bpe", split(LLAMA3), True),
        ("qwen2", split(QWEN2), False),
        ("gpt-4o", split(O200K), False),
        ("llama4", split(O200K), False),
        ("deepseek-v3", split(*DEEPSEEK3), False),
        ("glm4", split(LLAMA3), True),
    ],
)
def test_byte_level_tokens_are_those_of_the_original(pre: str, cut: Any, ignores_merges: bool) -> None:
    original = Library(BPE(unk_token=None, ignore_merges=ignores_merges))
    original.pre_tokenizer, original.decoder = cut, decoders.ByteLevel()
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=330, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(TEXTS, trainer)
    known = json.loads(original.to_str())["model"]
    tokens = sorted(known["vocab"], key=known["vocab"].__getitem__)
    made = of(
        metadata(
            model="gpt2",
            pre=pre,
            tokens=tokens,
            token_type=[3] + [1] * (len(tokens) - 1),
            merges=[" ".join(pair) for pair in known["merges"]],
        )
    )
    for text in TEXTS:
        assert list(made.encode(text + "<|end|>" + text)) == original.encode(text + "<|end|>" + text).ids
        assert made.decode(made.encode(text)) == (normalizers.NFC().normalize_str(text) if pre == "qwen2" else text)


def test_deepseek_v2_splits_at_scripts_signs_and_digits() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    read = metadata(model="gpt2", pre="deepseek-llm", tokens=alphabet, token_type=[1] * 256, merges=[])
    found = read_vocabulary(read)
    assert found is not None
    steps = Library.from_str(found.tokenizer_json).pre_tokenizer
    text = "Don't \u00c4rger \u03b2x,! 12\u65e5\u672c\n\uff41 \u10d3\u10d4  "
    pieces = [text[start:end] for _, (start, end) in steps.pre_tokenize_str(text)]
    # The signs ":-~" include the letters of ASCII, and the scripts of "\u0800-\u4e00" those of Georgia.
    assert pieces == [
        "Don", "'", "t", " \u00c4", "rger", " \u03b2", "x", ",!", " ", "1", "2", "\u65e5\u672c", "\n", "\uff41", " ", "\u10d3\u10d4", "  ",
    ]  # fmt: skip


def test_gemma_joins_its_listed_merges_in_order() -> None:
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\u2581", *"abc", "ab", "\u2581a", "bc", "<0x0A>", "<turn|>", "\n"]
    types = [3, 3, 3, 2, *([1] * 7), 6, 3, 1]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    read = metadata(
        model="gemma4",
        tokens=tokens,
        token_type=types,
        merges=["b c", "a b", "\u2581 a"],
        add_space_prefix=False,
        **ids,
    )
    made, vocabulary = of(read), read_vocabulary(read)
    assert list(made.encode("abc ab\na", add_special_tokens=True)) == [2, 5, 10, 4, 8, 13, 5]
    assert made.decode(made.encode("abc ab")) == "abc ab"
    assert vocabulary is not None
    assert vocabulary.eos_token_ids == [1, 12]


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (
            ["<|return|>", "<|call|>", "<|end|>"],
            [256, 257],
        ),  # gpt-oss: <|end|> ends the analysis, and the answer follows
        (["<|flush|>", "<|calls|>", "<|end|>"], [256, 257]),  # Solar Open
        (["<|end|>", "<|user|>"], [256]),  # Phi
        (["<turn|>", "<|tool_response>", "<|turn>"], [256, 257]),  # Gemma 4
        (["[EOS]", "[EOT]", "[BOS]"], [256, 257]),  # Kimi K2
    ],
)
def test_control_tokens_that_end_an_answer_are_known_by_name(control: list[str], ends: list[int]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    types = [1] * 256 + [3] * len(control)
    found = read_vocabulary(metadata(model="gpt2", pre="gpt-2", tokens=alphabet + control, token_type=types, merges=[]))
    assert found is not None
    assert found.eos_token_ids == ends


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
WORDS = [
    "\u2581",
    *"abnthescmoi",
    "an",
    "th",
    "\u2581the",
    "he",
    "at",
    "nan",
    "ana",
    "ab",
    "aba",
    "\u2581an",
    "\u2581t",
    "\u2581\u2581",
    "cat",
]


def by_scores(text: str, score_of: dict[str, float], tokens: list[str]) -> list[int]:
    """Return the tokens of a text by SentencePiece's rule.

    Neighbours that form the token with the best score are joined first, the leftmost of equals, until no two form a token. Parts without a token
    become bytes.
    """
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        pairs = [
            (score_of[left + right], -i) for i, (left, right) in enumerate(pairwise(parts)) if left + right in score_of
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [tokens.index(part)] if part in score_of else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_tokens_follow_from_their_scores() -> None:
    tokens = PIECES + WORDS
    scores = [0.0] * len(PIECES) + random.Random(5).sample([-float(i) for i in range(len(WORDS))], len(WORDS))
    types = [2, 3, 3] + [6] * 256 + [1] * len(WORDS)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    read = metadata(model="llama", tokens=tokens, scores=scores, token_type=types, **ids)
    made = of(read)
    score_of = dict(zip(tokens[259:], scores[259:], strict=True))
    for text in ("the cat", "that banana", "an  abab nanana", "ch\u00e9ts \u65e5", "x", "aaaa"):
        assert list(made.encode(text)) == by_scores(text, score_of, tokens)
        assert made.decode(made.encode(text)).strip() == text
        assert list(made.encode(text, add_special_tokens=True)) == [1, *made.encode(text)]
    vocabulary = read_vocabulary(read)
    assert vocabulary is not None
    assert vocabulary.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert vocabulary.eos_token_ids == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bpe"}, "a tokenizer of the kind 'bpe'; supported are gpt2, llama, gemma4, bert, t5"),
        ({"pre": "poro-chat"}, r"tokenizer.ggml.pre = 'poro-chat'; supported are gpt-2"),
        ({"token_type": [1]}, "lists 2 tokens and 1 types"),
        ({"merges": ["a c"]}, "has the merge 'a c'"),
        ({"merges": ["ab"]}, "has the merge 'ab'"),
        ({"tokens": 7}, "has tokenizer.ggml.tokens = 'int'; it must be a list of texts"),
        ({"model": "llama", "scores": [1.0]}, "lists 2 tokens and 1 scores"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    known: dict[str, Any] = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b"], "token_type": [1, 1], "merges": []}
    with pytest.raises(CheckpointError, match=message):
        read_vocabulary(metadata(**(known | changes)))

"""Converts the tokenizer in a GGUF file's metadata to the tokenizer.json of Hugging Face's library.

Two kinds are supported: "gpt2", byte-level BPE with merges, where `tokenizer.ggml.pre` names the patterns that split a text; and "llama", the BPE of
SentencePiece, whose merges follow from the scores of tokens. Patterns are from the tokenizer.json files of the models with these names; which names
share a pattern is from llama.cpp's src/llama-vocab.cpp (https://github.com/ggml-org/llama.cpp).
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.metadata import Metadata
from pilotlight.engine.text.spelling import WORD_MARK

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ggml's types of tokens
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
}  # fmt: skip

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Cut(NamedTuple):
    """The rules by which a text is split before BPE merges pairs."""

    patterns: tuple[str, ...]
    ignores_merges: bool = False  # a piece of text that is a token is used whole, without merges
    normalizer: str | None = None
    adds_bos: bool = False  # whether a text begins with the BOS token, unless the file specifies it


_LLAMA3_CUT, _QWEN2_CUT = _Cut((_LLAMA3,), ignores_merges=True, adds_bos=True), _Cut((_QWEN2,), normalizer="NFC")
_DIGITS_CUT, _WORDS_CUT = _Cut((r"\p{N}", _WORDS)), _Cut((_WORDS,))
_CUTS = {
    "gpt-2": _WORDS_CUT, "phi-2": _WORDS_CUT, "mpt": _WORDS_CUT, "olmo": _WORDS_CUT,
    "smollm": _DIGITS_CUT, "starcoder": _DIGITS_CUT, "refact": _DIGITS_CUT, "command-r": _DIGITS_CUT, "codeshell": _DIGITS_CUT,
    "llama-bpe": _LLAMA3_CUT, "llama3": _LLAMA3_CUT, "llama-v3": _LLAMA3_CUT, "falcon3": _LLAMA3_CUT,
    "smaug-bpe": _Cut((_LLAMA3,)), "dbrx": _Cut((_LLAMA3,)),
    "qwen2": _QWEN2_CUT, "deepseek-r1-qwen": _QWEN2_CUT, "megrez": _QWEN2_CUT, "qwen35": _Cut((_QWEN35,), normalizer="NFC"),
    "tekken": _Cut((_TEKKEN,), ignores_merges=True, adds_bos=True),
}  # fmt: skip


class Vocabulary(NamedTuple):
    """A model's tokenizer, its special tokens, and the tokens that end a turn."""

    tokenizer_json: str
    special_tokens: dict[str, str]  # special tokens by their names in tokenizer_config.json: bos_token, ...
    eos_token_ids: list[int]


def read_vocabulary(metadata: Metadata) -> Vocabulary | None:
    """Read the tokenizer; return None if the file has none.

    Raises CheckpointError for unsupported kinds, splits and lists.
    """
    model = metadata.text("tokenizer.ggml.model")
    if model == "no_vocab":
        return None
    if model not in ("gpt2", "llama"):
        raise CheckpointError(f"{metadata.origin} has a tokenizer of the kind {model!r}; supported are gpt2 and llama")
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"{metadata.origin} lists {len(tokens)} tokens and {len(types)} types of tokens")
    special = _special_ids(metadata, len(tokens))
    whole = metadata.text("tokenizer.huggingface.json", "")
    made = whole or json.dumps((_byte_level if model == "gpt2" else _sentencepiece)(metadata, tokens, types, special))
    named = {
        f"{key}_token": tokens[token_id] for key, token_id in special.items() if key in ("bos", "eos", "unk", "pad")
    }
    ends = {special[key] for key in ("eos", "eot", "eom") if key in special}
    ends |= {i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if text in _ENDS and kind == _CONTROL}
    return Vocabulary(made, named, sorted(ends))


def _special_ids(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding"}
    found = {}
    for key, name in keys.items():
        if f"tokenizer.ggml.{name}_token_id" not in metadata:
            continue
        token_id = metadata.integer(f"tokenizer.ggml.{name}_token_id")
        if token_id >= num_tokens:
            raise CheckpointError(f"{metadata.origin} has token {token_id} as its {key}, and {num_tokens} tokens")
        found[key] = token_id
    return found


def _byte_level(metadata: Metadata, tokens: list[str], types: list[int], special: dict[str, int]) -> dict[str, Any]:
    pre = metadata.text("tokenizer.ggml.pre", "")
    cut = _CUTS.get(pre)
    if cut is None:
        raise CheckpointError(
            f"{metadata.origin} has tokenizer.ggml.pre = {pre or 'nothing'!r}; supported are {', '.join(_CUTS)}"
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in cut.patterns
    ]
    steps = [*splits, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}]
    merges = [merge.split(" ", 1) for merge in metadata.texts("tokenizer.ggml.merges")]
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise CheckpointError(
                f"{metadata.origin} has the merge {' '.join(pair)!r}, which does not join two of its tokens to a third"
            )
    return {
        "version": "1.0",
        "added_tokens": list(_added(tokens, types)),
        "normalizer": None if cut.normalizer is None else {"type": cut.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": _post_processor(metadata, tokens, special, cut.adds_bos),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "BPE", "ignore_merges": cut.ignores_merges, "vocab": vocabulary, "merges": merges},
    }


def _sentencepiece(metadata: Metadata, tokens: list[str], types: list[int], special: dict[str, int]) -> dict[str, Any]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise CheckpointError(f"{metadata.origin} lists {len(tokens)} tokens and {len(scores)} scores")
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    unknown = (
        tokens[special["unk"]]
        if "unk" in special
        else next((t for t, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    )
    has_prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": WORD_MARK}
    steps = [{"type": "Prepend", "prepend": WORD_MARK}, marks] if has_prefix else [marks]
    spaces = {"type": "Replace", "pattern": {"String": WORD_MARK}, "content": " "}
    decoders = [spaces, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    joined = {text: (-scores[i], i) for text, i in vocabulary.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    return {
        "version": "1.0",
        "added_tokens": list(_added(tokens, types)),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": _post_processor(metadata, tokens, special, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": _BYTE in types, "ignore_merges": False,
            "vocab": vocabulary, "merges": list(_merges(joined)),
        },
    }  # fmt: skip


def _merges(rank_of: dict[str, tuple[float, int]]) -> Iterator[list[str]]:
    """Yield every split of a token into two tokens, ordered by the rank of the whole token.

    SentencePiece has no list of merges: it joins the neighbours that make the best token.
    """
    for token in sorted(rank_of, key=rank_of.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in rank_of and token[i:] in rank_of]
        yield from map(list, sorted(cuts, key=lambda cut: (rank_of[cut[0]], rank_of[cut[1]])))


def _added(tokens: list[str], types: list[int]) -> Iterator[dict[str, Any]]:
    for i, (text, kind) in enumerate(zip(tokens, types, strict=True)):
        if text and kind in (_CONTROL, _USER_DEFINED):
            yield {
                "id": i, "content": text, "special": kind == _CONTROL, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False,
            }  # fmt: skip


def _post_processor(
    metadata: Metadata, tokens: list[str], special: dict[str, int], adds_bos: bool
) -> dict[str, Any] | None:
    if "bos" not in special or not metadata.flag("tokenizer.ggml.add_bos_token", adds_bos):
        return None
    bos = tokens[special["bos"]]
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [special["bos"]], "tokens": [bos]}},
    }

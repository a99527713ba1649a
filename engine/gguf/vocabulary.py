"""Converts the tokenizer in a GGUF file's metadata to the tokenizer.json of Hugging Face's library.

Five kinds are supported: "gpt2", byte-level BPE with merges, where `tokenizer.ggml.pre` names the patterns that split a text; "llama", the BPE of
SentencePiece, whose merges follow from the scores of tokens; "gemma4", the same with listed merges; "bert", WordPiece; and "t5", SentencePiece's
unigrams. Patterns are from the tokenizer.json files of the models with these names; which names share a pattern is from llama.cpp's
src/llama-vocab.cpp (https://github.com/ggml-org/llama.cpp).
"""

import base64
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.metadata import Metadata
from pilotlight.engine.tokenizer.spelling import WORD_MARK
from pilotlight.engine.tokenizer.tokenizer_files import KIMI_PATTERN

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # ggml's types of tokens
# Control tokens that end an answer, as in llama.cpp's list (src/llama-vocab.cpp); files name only some of them.
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "<|end_of_text|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>", "<turn|>",
    "<eos>", "<|tool_response>", "</s>", "[EOS]", "[EOT]", "[e~[", "<|flush|>", "<|calls|>",
}  # fmt: skip
_RETURNS = {"<|return|>", "<|flush|>"}  # beside one of these, `<|end|>` ends only a message of the answer

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_QWEN35 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(end: str) -> str:
    """Return the pattern of words whose capitals precede their small letters, and which may have an `end`."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    return rf"[^\r\n\p{{L}}\p{{N}}]?{upper}*{lower}+{end}|[^\r\n\p{{L}}\p{{N}}]?{upper}+{lower}*{end}"


_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = _cased("") + r"|\p{N}" + _REST
_O200K = _cased("(?i:'s|'t|'re|'ve|'m|'ll|'d)?") + r"|\p{N}{1,3}" + _REST
_DEEPSEEK3 = (
    r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)  # fmt: skip
# The letters with case that DeepSeek-V2's tokenizer.json lists.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d"
    "\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-"
    "\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-"
    "\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-"
    "\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-"
    "\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-"
    "\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK2 = (
    r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}",
)  # fmt: skip


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
    "falcon-h1": _LLAMA3_CUT, "lfm2": _LLAMA3_CUT, "pixtral": _LLAMA3_CUT,
    "modern-bert": _WORDS_CUT, "roberta-bpe": _WORDS_CUT,
    "smaug-bpe": _Cut((_LLAMA3,)), "dbrx": _Cut((_LLAMA3,)),
    "qwen2": _QWEN2_CUT, "deepseek-r1-qwen": _QWEN2_CUT, "megrez": _QWEN2_CUT, "qwen35": _Cut((_QWEN35,), normalizer="NFC"),
    "tekken": _Cut((_TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": _Cut((_O200K,)), "llama4": _Cut((_O200K,)), "chatglm-bpe": _Cut((_LLAMA3,)), "glm4": _Cut((_LLAMA3,), ignores_merges=True),
    "deepseek-llm": _Cut(_DEEPSEEK2), "deepseek-v3": _Cut(_DEEPSEEK3), "kimi-k2": _Cut((KIMI_PATTERN,)),
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
    if model not in _KINDS:
        raise CheckpointError(
            f"{metadata.origin} has a tokenizer of the kind {model!r}; supported are {', '.join(_KINDS)}"
        )
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    if len(types) != len(tokens):
        raise CheckpointError(f"{metadata.origin} lists {len(tokens)} tokens and {len(types)} types of tokens")
    special = _special_ids(metadata, len(tokens))
    whole = metadata.text("tokenizer.huggingface.json", "")
    made = whole or json.dumps(_KINDS[model](metadata, tokens, types, special))
    named = {
        f"{key}_token": tokens[token_id] for key, token_id in special.items() if key in ("bos", "eos", "unk", "pad")
    }
    ends = {special[key] for key in ("eos", "eot", "eom") if key in special}
    ends |= {i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if text in _ENDS and kind == _CONTROL}
    if _RETURNS.intersection(tokens):
        ends -= {i for i, text in enumerate(tokens) if text == "<|end|>"}
    return Vocabulary(made, named, sorted(ends))


def _special_ids(metadata: Metadata, num_tokens: int) -> dict[str, int]:
    keys = {
        "bos": "bos", "eos": "eos", "eot": "eot", "eom": "eom", "unk": "unknown", "pad": "padding", "cls": "cls", "sep": "seperator", "mask": "mask",
    }  # fmt: skip
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
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    merges = _listed_merges(metadata, vocabulary)
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
    vocabulary = {text: i for i, (text, kind) in enumerate(zip(tokens, types, strict=True)) if kind != _UNUSED}
    is_listed = metadata.text("tokenizer.ggml.model") == "gemma4"
    merges = _listed_merges(metadata, vocabulary) if is_listed else _scored_merges(metadata, vocabulary, types)
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
    return {
        "version": "1.0",
        "added_tokens": list(_added(tokens, types)),
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "post_processor": _post_processor(metadata, tokens, special, True),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE", "unk_token": unknown, "fuse_unk": True, "byte_fallback": _BYTE in types, "ignore_merges": False,
            "vocab": vocabulary, "merges": merges,
        },
    }  # fmt: skip


def _listed_merges(metadata: Metadata, vocabulary: dict[str, int]) -> list[list[str]]:
    merges = [merge.split(" ", 1) for merge in metadata.texts("tokenizer.ggml.merges")]
    for pair in merges:
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise CheckpointError(
                f"{metadata.origin} has the merge {' '.join(pair)!r}, which does not join two of its tokens to a third"
            )
    return merges


def _scored_merges(metadata: Metadata, vocabulary: dict[str, int], types: list[int]) -> list[list[str]]:
    scores = _scores(metadata, len(types))
    joined = {text: (-scores[i], i) for text, i in vocabulary.items() if types[i] in (_NORMAL, _USER_DEFINED)}
    return list(_merges(joined))


def _scores(metadata: Metadata, num_tokens: int) -> list[float]:
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != num_tokens:
        raise CheckpointError(f"{metadata.origin} lists {num_tokens} tokens and {len(scores)} scores")
    return scores


def _unigrams(metadata: Metadata, tokens: list[str], types: list[int], special: dict[str, int]) -> dict[str, Any]:
    """Return the tokenizer of XLM-RoBERTa, with its table of characters' normal forms."""
    scores, charsmap = _scores(metadata, len(tokens)), "tokenizer.ggml.precompiled_charsmap"
    table = bytes([n % 256 for n in metadata.integers(charsmap)]) if charsmap in metadata else b""
    normalizer = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()} if table else None
    marks = {"type": "Metaspace", "replacement": WORD_MARK, "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "added_tokens": list(_added(tokens, types)),
        "normalizer": normalizer,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, marks]},
        "post_processor": _post_processor(metadata, tokens, special, False, True),
        "decoder": marks,
        "model": {
            "type": "Unigram", "unk_id": special.get("unk", 3), "vocab": list(map(list, zip(tokens, scores, strict=True))), "byte_fallback": False,
        },
    }  # fmt: skip


def _word_pieces(metadata: Metadata, tokens: list[str], types: list[int], special: dict[str, int]) -> dict[str, Any]:
    """Return BERT's tokenizer. In the file, tokens that begin a word have a mark, and others have none.

    Newer files state whether texts are lowered; else they are if no token has an upper-case letter.
    """
    spelled = [
        text if kind == _CONTROL else text[1:] if text.startswith(WORD_MARK) else f"##{text}"
        for text, kind in zip(tokens, types, strict=True)
    ]
    ids = {text: i for i, text in enumerate(spelled)}
    found = {"[CLS]": special.get("cls", special.get("bos")), "[SEP]": special.get("sep"), "[UNK]": special.get("unk")}
    first, last, unknown = (ids.get(text) if token_id is None else token_id for text, token_id in found.items())
    if first is None or last is None or unknown is None:
        raise CheckpointError(f"{metadata.origin} lacks one of the tokens {', '.join(found)}")
    is_lower = not any(text != text.lower() for text, kind in zip(spelled, types, strict=True) if kind == _NORMAL)
    is_lower = metadata.flag("tokenizer.ggml.normalizer.lowercase", is_lower)
    return {
        "version": "1.0",
        "added_tokens": list(_added(spelled, types)),
        "normalizer": {
            "type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": is_lower,
            "strip_accents": metadata.flag("tokenizer.ggml.normalizer.strip_accents", is_lower),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": _template(spelled, first, last, None, 1),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece", "unk_token": spelled[unknown], "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
            "vocab": ids,
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
    metadata: Metadata, tokens: list[str], special: dict[str, int], adds_bos: bool, adds_eos: bool = False
) -> dict[str, Any] | None:
    """Return the template with the BOS and EOS tokens of a text.

    RoBERTa's tokenizers put two EOS tokens between two texts.
    """
    first, last = (
        special.get(key) if metadata.flag(f"tokenizer.ggml.add_{key}_token", default) else None
        for key, default in (("bos", adds_bos), ("eos", adds_eos))
    )
    if first is None and last is None:
        return None
    is_doubled = (
        metadata.text("tokenizer.ggml.model") == "t5" or metadata.text("tokenizer.ggml.pre", "") == "roberta-bpe"
    )
    return _template(tokens, first, last, first if last is None else last if is_doubled else None, int(last is None))


def _template(
    tokens: list[str], first: int | None, last: int | None, between: int | None, second_type: int
) -> dict[str, Any]:
    """Return a template of one or two texts.

    `between`: a token before the second text; `second_type`: the token type of the second text.
    """

    def token(token_id: int | None, token_type: int = 0) -> list[dict[str, Any]]:
        return [] if token_id is None else [{"SpecialToken": {"id": tokens[token_id], "type_id": token_type}}]

    def text(name: str, token_type: int = 0) -> list[dict[str, Any]]:
        return [{"Sequence": {"id": name, "type_id": token_type}}, *token(last, token_type)]

    used = {token_id for token_id in (first, last) if token_id is not None}
    return {
        "type": "TemplateProcessing",
        "single": [*token(first), *text("A")],
        "pair": [*token(first), *text("A"), *token(between), *text("B", second_type)],
        "special_tokens": {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in used},
    }


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _sentencepiece, "bert": _word_pieces, "t5": _unigrams}

"""A checkpoint's tokenizer as a tokenizer.json, the only format that the tokenizers library reads.

It is read as it is, or converted from Mistral's tekken.json or Kimi's tiktoken.model. These list the byte strings of a vocabulary by rank. tiktoken
always joins the two neighbours that form the token of lowest rank, while the library joins pairs in the order of a list of merges. So the list
contains, for each token in the order of ranks, all its splits into two tokens.
"""

import base64
import binascii
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import TokenizerError
from pilotlight.engine.api.plain_files import read_bytes, read_text
from pilotlight.engine.tokenizer.spelling import BYTE_LEVEL_ALPHABET

# The pattern by which Kimi's models split a text, copied from the tokenization_kimi.py beside their weights, the only file that has it.
KIMI_PATTERN = "|".join([
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
])  # fmt: skip
KIMI_RESERVED = 256  # number of special token ids after the ranked tokens
KIMI_CLASS = "TikTokenTokenizer"
# Special tokens, from mistral-common, that tekken.json omits before version 8.
TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]",
    "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
BOS = "<s>"
_MOST_SPECIAL = 1 << 20  # most special tokens of a tekken.json; Mistral's have 1,000

Ranks = dict[bytes, int]


class SpecialToken(NamedTuple):
    token_id: int
    text: str
    is_hidden: bool  # True if the token is not part of an answer's text


def tokenizer_json(directory: Path) -> str:
    """Return a checkpoint's tokenizer as the text of a tokenizer.json. Raises TokenizerError."""
    for name, read in READERS.items():
        path = directory / name
        try:
            return read(path)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{path} cannot be read: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, binascii.Error) as error:
            raise TokenizerError(f"{path} is not a tokenizer: {error!r}") from None
    first, *others = READERS
    raise TokenizerError(
        f"{directory / first} is missing; a model directory needs its {first}"
        + "".join(f", or {name}" for name in others)
    )


def _plain(path: Path) -> str:
    return read_text(path)


def _tekken(path: Path) -> str:
    """Convert tekken.json.

    Special tokens precede the ranked tokens; the file names only some of them. The vocabulary is truncated to the size in the file's `config`.
    """
    fields = json.loads(read_text(path))
    config = fields["config"]
    num_special = int(config["default_num_special_tokens"])
    if num_special > _MOST_SPECIAL:
        raise ValueError(f"it has default_num_special_tokens = {num_special}; it may be {_MOST_SPECIAL} at most")
    named = fields.get("special_tokens") or [{"rank": i, "token_str": text} for i, text in enumerate(TEKKEN_SPECIAL)]
    special = {
        int(token["rank"]): SpecialToken(int(token["rank"]), token["token_str"], token.get("is_control", True))
        for token in named
    }
    for token_id in range(num_special):
        special.setdefault(token_id, SpecialToken(token_id, f"<SPECIAL_{token_id}>", True))
    ranked = fields["vocab"][: int(config["default_vocab_size"]) - num_special]
    ranks = {base64.b64decode(token["token_bytes"], validate=True): int(token["rank"]) for token in ranked}
    made = _written(ranks, config["pattern"], list(special.values()), first_id=num_special)
    bos = next((token for token in special.values() if token.text == BOS), None)
    if bos is not None:
        made["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": BOS, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {BOS: {"id": BOS, "ids": [bos.token_id], "tokens": [BOS]}},
        }
    return json.dumps(made)


def _tiktoken(path: Path) -> str:
    lines = (line.split() for line in read_bytes(path).splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    config = json.loads(read_text(path.parent / "tokenizer_config.json"))
    if config.get("tokenizer_class") != KIMI_CLASS:
        message = f"tokenizer_class in its tokenizer_config.json is {config.get('tokenizer_class')!r}; only {KIMI_CLASS} is supported"
        raise ValueError(message)
    special = {
        int(token_id): SpecialToken(int(token_id), token["content"], bool(token.get("special", True)))
        for token_id, token in (config.get("added_tokens_decoder") or {}).items()
    }
    for token_id in range(len(ranks), len(ranks) + KIMI_RESERVED):
        special.setdefault(token_id, SpecialToken(token_id, f"<|reserved_token_{token_id}|>", True))
    return json.dumps(_written(ranks, KIMI_PATTERN, list(special.values())))


READERS: dict[str, Callable[[Path], str]] = {
    "tokenizer.json": _plain, "tekken.json": _tekken, "tiktoken.model": _tiktoken,
}  # fmt: skip


def _written(ranks: Ranks, pattern: str, special: list[SpecialToken], first_id: int = 0) -> dict[str, Any]:
    """Return the fields of a tokenizer.json. The vocabulary includes special tokens, to keep their ids."""
    if sorted(ranks.values()) != list(range(len(ranks))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("the ranks are not 0, 1, 2, ..., or a byte is missing from the vocabulary")
    spelled = {token: "".join(BYTE_LEVEL_ALPHABET[byte] for byte in token) for token in ranks}
    vocabulary = {spelled[token]: rank + first_id for token, rank in ranks.items()}
    special.sort()
    if taken := next((token.text for token in special if token.text in vocabulary), None):
        raise ValueError(f"{taken!r} is both a special token and an ordinary one")
    vocabulary |= {token.text: token.token_id for token in special}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": token.token_id, "content": token.text, "special": token.is_hidden, "single_word": False, "lstrip": False,
                "rstrip": False, "normalized": False,
            }
            for token in special
        ],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {
            "type": "BPE",
            "ignore_merges": True,  # a piece of text that equals a token is not split further, as in tiktoken
            "vocab": vocabulary,
            "merges": [[spelled[left], spelled[right]] for left, right in _merges(ranks)],
        },
    }  # fmt: skip


def _merges(ranks: Ranks) -> Iterator[tuple[bytes, bytes]]:
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        # If two splits overlap in a text, as those of "aba" in ab|a|ba, tiktoken takes the left one, which is the split whose right part is also a
        # prefix of the token.
        yield from sorted(cuts, key=lambda cut: (not token.startswith(cut[1]), ranks[cut[0]], ranks[cut[1]]))

"""Tokenizers of encoders, made from the metadata of a GGUF file, give the same ids as the original tokenizers."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Library
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.vocabulary import read_vocabulary
from tests.engine.gguf.test_vocabulary import TEXTS, metadata

CASED = (*TEXTS, "Der Vogel SINGT, die Banane reift.")


def made(**values: Any) -> Library:
    found = read_vocabulary(metadata(**values))
    assert found is not None
    return Library.from_str(found.tokenizer_json)


def assert_equal(found: Library, original: Library) -> None:
    for first, second in zip(CASED, reversed(CASED), strict=True):
        assert found.encode(first, add_special_tokens=False).ids == original.encode(first, add_special_tokens=False).ids
        assert found.encode(first).ids == original.encode(first).ids
        pair, expected = found.encode(first, second), original.encode(first, second)
        assert (pair.ids, pair.type_ids) == (expected.ids, expected.type_ids)


@pytest.mark.parametrize("is_lower", [True, False])
@pytest.mark.parametrize("states_case", [True, False])
def test_word_pieces_are_those_of_the_original(is_lower: bool, states_case: bool) -> None:
    original = Library(models.WordPiece(unk_token="[UNK]"))
    original.normalizer = normalizers.BertNormalizer(lowercase=is_lower)
    original.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=160, special_tokens=special, show_progress=False)
    original.train_from_iterator(CASED, trainer)
    original.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    vocabulary = original.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)[len(special) :]
    marked = [piece[2:] if piece.startswith("##") else f"\u2581{piece}" for piece in pieces]
    ids = {"unknown_token_id": 1, "cls_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0, "mask_token_id": 4}
    stated = {"normalizer.lowercase": is_lower} if states_case else {}
    found = made(
        model="bert", tokens=special + marked, token_type=[3] * 5 + [1] * len(marked), **ids, **stated
    )  # fmt: skip
    assert_equal(found, original)


def test_unigrams_are_those_of_the_original() -> None:
    original = Library(models.Unigram())
    marks = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always")
    original.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), marks])
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False
    )  # fmt: skip
    original.train_from_iterator(CASED, trainer)
    original.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokens, scores = zip(*json.loads(original.to_str())["model"]["vocab"], strict=True)
    types = [3, 3, 3, 2] + [1] * (len(tokens) - 4)
    ids = {"bos_token_id": 0, "eos_token_id": 2, "unknown_token_id": 3, "add_bos_token": True}
    found = made(model="t5", tokens=list(tokens), scores=list(scores), token_type=types, **ids)
    assert_equal(found, original)


def test_word_pieces_without_their_special_tokens_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"lacks one of the tokens \[CLS\], \[SEP\], \[UNK\]"):
        made(model="bert", tokens=["a", "b"], token_type=[1, 1])

"""GGUF files of encoders give the embeddings and scores of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, Gemma3TextConfig

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.gguf.directory import directory_of
from tests.checkpoints import AWKWARD
from tests.classifiers import CLASSIFIERS, reference_logits, write_classifier
from tests.embedders import EMBEDDERS, Embedder, reference, write_embedder
from tests.engine.driver import load_engine, one, random_prompt, submit
from tests.engine.gguf.encoder_files import write_encoder
from tests.engine.gguf.files import Kind

TOLERANCE = 1e-4
_GEMMA: dict[str, Any] = {
    key: value for key, value in AWKWARD.items() if value is not None and key not in ("rope_parameters", "tie_word_embeddings")
} | {"sliding_window_pattern": 3}  # fmt: skip
GEMMA = Gemma3TextConfig(**_GEMMA, sliding_window=8, query_pre_attn_scalar=10, use_bidirectional_attention=True)
ENCODERS: dict[str, tuple[Embedder, dict[str, Any]]] = {
    "embeddinggemma": (
        Embedder(GEMMA, "mean", is_normalized=True, dense=(57,)), {"attention.sliding_window_pattern": 3, "attention.causal": True}
    ),
    "modernbert with biases": (EMBEDDERS["modernbert with biases, mean"], {"attention.sliding_window_pattern": 2}),
    **{
        name: (EMBEDDERS[name], {})
        for name in (
            "bert, first token",
            "bert, mean, of any length",
            "xlm-roberta, mean",
            "xlm-roberta, five heads, first token",
            "modernbert, first token",
        )
    },
}  # fmt: skip
CODED = BertConfig(
    vocab_size=431, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=96,
    initializer_range=0.15, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize("name", ENCODERS)
def test_a_file_gives_the_embeddings_of_transformers_with_length_one(name: str, tmp_path: Path) -> None:
    embedder, extra = ENCODERS[name]
    model = write_embedder(tmp_path, embedder)
    file = write_encoder(tmp_path, embedder.config, embedder.pooling, **extra)
    engine, prompt = load_engine(directory_of(file, tmp_path / "store")), random_prompt(60, seed=4)
    assert engine.info.pooling == embedder.pooling
    found = one(engine, submit("a", prompt, pooling=embedder.pooling)).embedding
    assert found is not None
    expected = reference(model, embedder._replace(is_normalized=True), prompt)
    assert (torch.tensor(found) - expected).abs().max() <= TOLERANCE


def test_codes_of_words_and_matrices_give_the_embedding_of_their_numbers(tmp_path: Path, unpacked: None) -> None:
    write_embedder(tmp_path, Embedder(CODED, "mean", is_normalized=True))
    found = []
    for kind in (Kind.F32, Kind.Q8_0):
        engine = load_engine(directory_of(write_encoder(tmp_path, CODED, "mean", kind), tmp_path / "store"))
        found.append(torch.tensor(one(engine, submit("a", random_prompt(60, seed=4), pooling="mean")).embedding))
    assert 0 < (found[1] - found[0]).abs().max() < 0.01


@pytest.mark.parametrize("name", ["roberta, two classes", "xlm-roberta"])
def test_a_file_gives_the_scores_of_transformers(name: str, tmp_path: Path) -> None:
    classifier = CLASSIFIERS[name]
    model = write_classifier(tmp_path, classifier)
    engine = load_engine(directory_of(write_encoder(tmp_path, classifier.config, None), tmp_path / "store"))
    assert (len(engine.info.labels), engine.info.activation) == (classifier.num_labels, classifier.activation)
    prompt = random_prompt(60, seed=4)
    found = one(engine, submit("a", prompt, pooling="cls")).embedding
    assert (torch.tensor(found) - reference_logits(model, classifier, prompt)).abs().max() <= TOLERANCE


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"pooling_type": 4}, "bert.pooling_type = 4; supported are 1, 2, 3"),
        ({"attention.causal": True}, "hides later tokens, which is not supported for bert"),
        ({"rope.freq_base": 1.0, "rope.scaling.alpha": 2.0}, "the rotary key bert.rope.scaling.alpha, which is not known"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_embedder(tmp_path, Embedder(CODED, "mean", is_normalized=True))
    file = write_encoder(tmp_path, CODED, "mean", **extra)
    with pytest.raises(CheckpointError, match=message):
        directory_of(file, tmp_path / "store")

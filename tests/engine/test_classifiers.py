"""Classifiers of texts and pairs of texts, compared with `transformers` along the paths of the scheduler, and refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.engine.weights.pooling_recipe import read_recipe
from tests.checkpoints import change_config, change_tensors, write_tokenizer
from tests.classifiers import CLASSIFIERS, NO, YES, Classifier, reference_logits, write_classifier, write_score_modules
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit

TOLERANCE = 1e-4
Written = tuple[Path, Classifier, PreTrainedModel]


@pytest.fixture(scope="module", params=CLASSIFIERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory, classifier = tmp_path_factory.mktemp("classifier"), CLASSIFIERS[request.param]
    return directory, classifier, write_classifier(directory, classifier)


def assert_agrees(heard: Heard, expected: torch.Tensor) -> None:
    assert heard.error is None
    assert heard.embedding is not None
    assert (torch.tensor(heard.embedding) - expected).abs().max() <= TOLERANCE


def test_a_text_has_the_logits_of_transformers(written: Written) -> None:
    directory, classifier, model = written
    engine = load_engine(directory)
    info = engine.info
    assert (info.pooling, len(info.labels), info.activation) == (
        classifier.pooling, classifier.num_labels, classifier.activation
    )  # fmt: skip
    for length in (1, 2, 77):
        prompt = random_prompt(length, seed=length)
        heard = one(engine, submit("a", prompt, pooling=classifier.pooling))
        assert_agrees(heard, reference_logits(model, classifier, prompt))


def test_pairs_in_one_batch_agree_each_for_itself(written: Written) -> None:
    directory, classifier, model = written
    engine = load_engine(directory, max_num_batched_tokens=64)
    pairs = {str(n): (random_prompt(n, seed=n), n // 2) for n in (2, 5, 33, 70)}
    pairs["one text"] = random_prompt(12, seed=1), 0
    heard = drain(
        engine,
        [
            submit(name, prompt, pooling=classifier.pooling, second_from=second)
            for name, (prompt, second) in pairs.items()
        ],
    )
    for name, (prompt, second) in pairs.items():
        assert_agrees(heard[name], reference_logits(model, classifier, prompt, second))


@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_a_chunked_text_agrees(tmp_path: Path, budget: int) -> None:
    for name, classifier in CLASSIFIERS.items():
        if classifier.is_decoder:
            model = write_classifier(tmp_path / name, classifier)
            engine = load_engine(tmp_path / name, max_num_batched_tokens=budget)
            for length in (61, 75):  # the second prompt finds the cached blocks of the first
                prompt = random_prompt(61, seed=2) + random_prompt(length - 61, seed=3)
                heard = one(engine, submit(str(length), prompt, pooling="last"))
                assert_agrees(heard, reference_logits(model, classifier, prompt))


def test_a_second_text_changes_the_scores_of_a_model_that_distinguishes_texts(tmp_path: Path) -> None:
    write_classifier(tmp_path, CLASSIFIERS["bert"])
    engine = load_engine(tmp_path)
    prompt = random_prompt(20, seed=1)
    whole = one(engine, submit("a", prompt, pooling="cls")).embedding
    pair = one(engine, submit("b", prompt, pooling="cls", second_from=9)).embedding
    assert whole is not None
    assert pair is not None
    assert abs(whole[0] - pair[0]) > 1e-3
    refused = one(engine, submit("c", prompt, pooling="cls", second_from=20))
    assert refused.error == "second_from is 20; it must be from 0 to 19"


def test_a_model_that_scores_is_asked_for_nothing_else(tmp_path: Path) -> None:
    write_classifier(tmp_path, CLASSIFIERS["bert"])
    engine = load_engine(tmp_path)
    assert one(engine, submit("a", [5, 6])).error == "tiny is a model that scores texts; it cannot generate text"
    refused = one(engine, submit("b", [5, 6], pooling="mean"))
    assert refused.error == "tiny scores classes by the pooling cls, not mean"


def test_the_plan_counts_the_head(tmp_path: Path) -> None:
    for name, classifier in CLASSIFIERS.items():
        write_classifier(tmp_path / name, classifier)
        planned = sum(shape.numbers for _, shape in read_model(tmp_path / name).weights())
        assert 4 * planned == load_engine(tmp_path / name).info.weights_bytes, name


@pytest.mark.parametrize(
    ("config", "sentences", "num_labels", "activation"),
    [
        ({}, {}, 1, "sigmoid"),
        ({}, {}, 3, "softmax"),
        ({"problem_type": "multi_label_classification"}, {}, 3, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, {}, 1, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, 1, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, {}, 3, "softmax"),
        ({}, {"activation_fn": "torch.nn.modules.linear.Identity"}, 1, "none"),
        ({"sentence_transformers": {"version": "4.1"}}, {"activation_fn": "torch.nn.Sigmoid"}, 1, "sigmoid"),
    ],
)
def test_scores_are_made_as_the_checkpoint_says(
    tmp_path: Path, config: dict[str, Any], sentences: dict[str, Any], num_labels: int, activation: str
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(sentences))
    labels = {str(i): f"LABEL_{i}" for i in range(num_labels)}
    recipe = read_recipe(tmp_path, {"architectures": ["BertForSequenceClassification"], "id2label": labels, **config})
    assert recipe is not None
    assert recipe.classes is not None
    assert recipe.classes.activation == activation


def test_a_model_without_modules_answers_by_the_tokens_that_its_config_names(tmp_path: Path) -> None:
    classifier = CLASSIFIERS["qwen3, yes or no"]
    model = write_classifier(tmp_path, classifier)
    (tmp_path / "modules.json").unlink()
    assert load_engine(tmp_path).info.pooling is None, "a model generates unless its files name another task"
    write_tokenizer(tmp_path)
    vocabulary = json.loads((tmp_path / "tokenizer.json").read_text())["model"]["vocab"]
    words = {token_id: word for word, token_id in vocabulary.items()}
    change_config(tmp_path, classifier_from_token=[words[NO], words[YES]])
    prompt = random_prompt(20, seed=1)
    heard = one(load_engine(tmp_path), submit("a", prompt, pooling="last"))
    assert_agrees(heard, reference_logits(model, classifier, prompt))
    change_config(tmp_path, classifier_from_token=["no such word", "a"])
    with pytest.raises(CheckpointError, match=r"classifier_from_token = .*; each must be one token"):
        load_engine(tmp_path)
    change_config(tmp_path, classifier_from_token="yes")
    with pytest.raises(CheckpointError, match=r'must be the words for no and yes: \["no", "yes"\]'):
        load_engine(tmp_path)


@pytest.mark.parametrize(
    ("score", "said"),
    [
        ({"true_token_id": 431, "false_token_id": 5}, r"scores by the tokens \[431, 5\], and its vocabulary has 431"),
        ({"true_token_id": "yes"}, "true_token_id = 'yes' and false_token_id = None; they must be token ids"),
        ({"true_token_id": 4, "module_input_name": "logits"}, "module_input_name = 'logits'; supported is"),
    ],
)
def test_a_score_that_is_not_computed_is_refused_by_name(tmp_path: Path, score: dict[str, Any], said: str) -> None:
    write_classifier(tmp_path, CLASSIFIERS["qwen3, yes or no"])
    write_score_modules(tmp_path, score)
    with pytest.raises(CheckpointError, match=said):
        load_engine(tmp_path)


def test_a_config_that_contradicts_its_tensors_is_refused_with_both(tmp_path: Path) -> None:
    write_classifier(tmp_path, CLASSIFIERS["bert"])
    change_config(tmp_path, id2label={"0": "no", "1": "yes"})
    with pytest.raises(
        CheckpointError, match=r"classifier.weight .* has shape \[1, 42\], but config.json makes it \[2, 42\]"
    ):
        load_engine(tmp_path)
    change_config(tmp_path, id2label={"1": "yes"})
    with pytest.raises(CheckpointError, match="id2label that does not name the classes from 0 on"):
        load_engine(tmp_path)
    change_config(tmp_path, id2label={"0": "LABEL_0"})
    change_tensors(tmp_path, lambda tensors: tensors.pop("classifier.weight"))
    with pytest.raises(CheckpointError, match=r"tensor classifier.weight is missing from .*; config.json asks for it"):
        load_engine(tmp_path)


def test_an_activation_and_modules_that_are_not_computed_are_refused_by_name(tmp_path: Path) -> None:
    write_classifier(tmp_path, CLASSIFIERS["modernbert"])
    change_config(tmp_path, sentence_transformers={"activation_fn": "torch.nn.Tanh"})
    with pytest.raises(CheckpointError, match=r"config.json asks for the activation 'torch.nn.Tanh'; supported are"):
        load_engine(tmp_path)
    change_config(tmp_path, sentence_transformers=None, classifier_pooling="max")
    with pytest.raises(CheckpointError, match="classifier_pooling = 'max'; supported are cls and mean"):
        load_engine(tmp_path)
    change_config(tmp_path, classifier_pooling="cls")
    write_score_modules(tmp_path, {"true_token_id": 4})
    with pytest.raises(
        CheckpointError, match=r"modules.json lists Transformer, LogitScore after ModernBertForSequence"
    ):
        load_engine(tmp_path)

"""The classes of a classifier or reranker, as its config.json names them."""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape

CLASSIFIER = "ForSequenceClassification"  # suffix of the architectures of classifiers
SCORE = "score"  # name of a decoder's classification head
_MOST_CLASSES = 100_000


def is_classifier(config: Mapping[str, Any]) -> bool:
    """Return True if the architecture has a classification head."""
    return any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or [])


def scores_by_decoder(config: Mapping[str, Any], architecture: str) -> bool:
    """Return True if a decoder scores the classes. `architecture`: the result of `find_architecture`."""
    return is_classifier(config) and not architecture.endswith(CLASSIFIER)


def score_weights(config: Mapping[str, Any], architecture: str, hidden_size: int) -> list[WeightShape]:
    """Return the classification head of a decoder; an encoder's own weights include its head."""
    if not scores_by_decoder(config, architecture):
        return []
    return [WeightShape("head", SCORE, len(class_labels(config)), hidden_size, is_unpacked=True)]


def class_labels(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels of the classes, in the order of the head's rows.

    They are in id2label, which transformers omits for two classes without names.
    """
    named = config.get("id2label")
    if named is None:
        count = config.get("num_labels", 2)
        if type(count) is not int or not 1 <= count <= _MOST_CLASSES:
            raise CheckpointError(f"config.json has num_labels = {count!r}; it must be from 1 to {_MOST_CLASSES}")
        return tuple([f"LABEL_{i}" for i in range(count)])
    if not isinstance(named, dict) or {str(i) for i in range(len(named))} != set(map(str, named)) or not named:
        raise CheckpointError("config.json has an id2label that does not name the classes from 0 on, each once")
    return tuple([str(label) for _, label in sorted(named.items(), key=lambda item: int(item[0]))])

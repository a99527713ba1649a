"""Fields of a checkpoint's JSON files, read once with their types: what is wrong is named with its key and value.

What makes a checkpoint an embedding model, sentence-transformers writes down in files of its own (modules.json, 1_Pooling/config.json): a recipe is
read from these, and every step they describe that the engine does not compute is refused by name.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.errors import CheckpointError
from engine.protocol import Pooling
from engine.weights.checkpoint import read_json

_MODES: dict[str, Pooling] = {
    "cls": "cls", "cls_token": "cls", "mean": "mean", "mean_tokens": "mean", "lasttoken": "last", "last": "last",
}  # fmt: skip
_PREFIX = "pooling_mode_"


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive whole number")
    return value


def whole_number(config: Mapping[str, Any], key: str, most: int) -> int:
    """Return a number from 0, which it is where it is not given, to `most`."""
    value = config.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a whole number from 0 to {most}")
    return value


def layer_numbers(config: Mapping[str, Any], key: str, num_layers: int) -> list[int]:
    """Return a list of layers; none where it is not given."""
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(i, int) and 0 <= i < num_layers for i in value):
        raise CheckpointError(f"config.json has {key} = {value!r}; they must be layers below {num_layers}")
    return value


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a number")
    return float(value)


def positive_number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = number(config, key, default)
    if value <= 0:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive number")
    return value


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be true or false")
    return value


def quantization(config: Mapping[str, Any]) -> Any:
    """Return what a config.json says of its weights' format: for all of them, or for those of its text alone."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return the method by which the weights are quantized; None where they are not."""
    described = quantization(config)
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    return str(method or "by an unnamed method")


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory, "config.json", wanted=("architectures",))


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a turn: those of generation_config.json where it has any, and of config.json."""
    generation = (
        read_json(directory, "generation_config.json") if (directory / "generation_config.json").exists() else {}
    )
    ids: set[int] = set()
    for source in (generation, config):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) for i in values):
            raise CheckpointError(f"{directory} has eos_token_id = {value!r}; it must be a token id or a list of them")
        ids.update(values)
    return tuple(sorted(ids))


class EmbeddingRecipe(NamedTuple):
    """How the hidden states of a text become one vector."""

    pooling: Pooling
    is_normalized: bool  # to length 1
    max_tokens: int | None  # of a text, where the checkpoint says less than its positions allow


def read_recipe(directory: Path, config: Mapping[str, Any]) -> EmbeddingRecipe | None:
    """Return the recipe of an embedding model; None for a model that generates. Raises CheckpointError."""
    modules_file = directory / "modules.json"
    if not modules_file.exists():
        names = config.get("architectures") or []
        if names and all(_has_no_head(str(name)) for name in names):
            raise CheckpointError(
                f"config.json names architecture {', '.join(map(str, names))}, which has no output head, and {directory} does not say "
                "how to make embeddings of it: modules.json and 1_Pooling/config.json, as sentence-transformers writes them, are missing"
            )
        return None
    modules = _modules(modules_file)
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise CheckpointError(
            f"modules.json lists {', '.join(kinds)}; supported are Transformer, Pooling and, last, Normalize"
        )
    if modules[0][1]:
        raise CheckpointError(
            f"modules.json has the transformer in {modules[0][1]!r}; it must lie in the directory itself"
        )
    pooling = _pooling(directory / modules[1][1])
    return EmbeddingRecipe(pooling, is_normalized=len(modules) == 3, max_tokens=_max_tokens(directory))


def _has_no_head(architecture: str) -> bool:
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


def _modules(file: Path) -> list[tuple[str, str]]:
    """Return each module's kind and folder."""
    try:
        listed = json.loads(file.read_bytes())
        return [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in listed]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} is no list of modules, each with its type and path: {error!r}") from error


def _pooling(directory: Path) -> Pooling:
    """Read the one mode: older files have a flag for every mode, newer ones name it."""
    config = read_json(directory, "config.json")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named or [])
    modes += [key.removeprefix(_PREFIX) for key, value in config.items() if key.startswith(_PREFIX) and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise CheckpointError(
            f"{directory / 'config.json'} asks for the pooling {' and '.join(map(str, modes)) or 'none'}; "
            "supported is one of mean, cls and lasttoken"
        )
    return _MODES[modes[0]]


def _max_tokens(directory: Path) -> int | None:
    file = "sentence_bert_config.json"
    if not (directory / file).exists():
        return None
    config = read_json(directory, file)
    return None if config.get("max_seq_length") is None else positive_int(config, "max_seq_length")

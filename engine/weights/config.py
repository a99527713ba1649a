"""Fields of a checkpoint's JSON files, read once with their types: what is wrong is named with its key and value."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.weights.reader import read_json


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive whole number")
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


def quantization(config: Mapping[str, Any]) -> str | None:
    """The method by which the weights are quantized, if they are."""
    described = config.get("quantization_config")
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    return str(method or "by an unnamed method")


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory, "config.json", wanted=("architectures",))


def eos_token_ids(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that end a turn: of generation_config.json where it has any, and of config.json."""
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

"""Fields of a checkpoint's JSON files, read once with their types: what is wrong is named with its key and value."""

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


def read_config(directory: Path) -> dict[str, Any]:
    """config.json, once it is known to describe plain weights."""
    config = read_json(directory, "config.json", wanted=("architectures",))
    if config.get("quantization_config"):
        method = dict(config["quantization_config"]).get("quant_method", "unknown")
        raise CheckpointError(
            f"{directory} is quantized ({method}); supported are float32, float16 and bfloat16 weights"
        )
    return config


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

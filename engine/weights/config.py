"""Typed fields of a checkpoint's JSON files; errors name key and value."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.checkpoint import read_json

# Limits of the sizes in a config.json, above those of all published models: contexts have up to 10 million positions. They bound what is built from
# a config before its tensors are compared with the files.
_MOST = 1 << 24
MOST_LAYERS, _MOST_EXPERTS, _MOST_PIXELS = 1 << 10, 1 << 14, 1 << 40  # images are limited separately
_MOST_OF = {
    **dict.fromkeys(("num_hidden_layers", "vt_num_hidden_layers", "depth"), MOST_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _MOST_EXPERTS),
    **dict.fromkeys(("min_pixels", "max_pixels", "shortest_edge", "longest_edge"), _MOST_PIXELS),
}


@contextmanager
def refusing_types(file: str = "config.json") -> Iterator[None]:
    """Convert errors that a value of an unexpected type causes inside the `with` to CheckpointError."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        raise CheckpointError(f"{file} has a value that its key cannot have: {error}") from error


def positive_int(config: Mapping[str, Any], key: str, default: int | None = None, most: int | None = None) -> int:
    """Return an integer from 1 to `most`, or to the limit of the key. Raises CheckpointError."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a positive whole number")
    if value > (most := most or _MOST_OF.get(key, _MOST)):
        raise CheckpointError(f"config.json has {key} = {value}; it may be {most} at most")
    return value


def whole_number(config: Mapping[str, Any], key: str, most: int) -> int:
    """Return an integer from 0 to `most`; 0 if the key is missing."""
    value = config.get(key) or 0
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise CheckpointError(f"config.json has {key} = {value!r}; it must be a whole number from 0 to {most}")
    return value


def layer_numbers(config: Mapping[str, Any], key: str, num_layers: int) -> list[int]:
    """Return a list of layer numbers; empty if the key is missing."""
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


def architecture(config: Mapping[str, Any]) -> str:
    return ", ".join(map(str, config.get("architectures") or ["this architecture"]))


def refuse_unless(config: Mapping[str, Any], key: str, *supported: Any) -> None:
    """Raise CheckpointError unless config.json has a supported value for `key`, or none."""
    value = config.get(key, supported[0])
    if value not in supported:
        raise CheckpointError(
            f"config.json has {key} = {value!r}; supported for {architecture(config)} is "
            f"{' or '.join(map(repr, supported))}"
        )


def quantization(config: Mapping[str, Any]) -> Any:
    """Return `quantization_config` of config.json or of its text_config, or None."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)


def quantization_method(config: Mapping[str, Any]) -> str | None:
    """Return the method by which the weights are quantized, or None."""
    described = quantization(config)
    if not described:
        return None
    method = described.get("quant_method") if isinstance(described, dict) else None
    return str(method or "by an unnamed method")


def require_modelopt_fp8(described: Mapping[str, Any]) -> None:
    """Raise CheckpointError if the quantization_config of ModelOpt describes another format than FP8."""
    algorithm = described.get("quant_algo")
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise CheckpointError(
            f"config.json's quantization_config has quant_algo = {algorithm!r}; supported for modelopt are FP8 and FP8_PER_CHANNEL_PER_TOKEN"
        )


def read_config(directory: Path) -> dict[str, Any]:
    return read_json(directory, "config.json", wanted=("architectures",))


def eos_token_ids(directory: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of tokens that end a turn, from generation_config.json and config.json.

    Ids outside the vocabulary are ignored.
    """
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
    return tuple(sorted(i for i in ids if 0 <= i < vocab_size))

"""An adapter in PEFT's format: adapter_config.json and adapter_model.safetensors, read without torch.

Describes which projections an adapter changes, with which rank and scale. Only plain low-rank adapters are supported; an error names whatever else
an adapter needs, because without it the answers would be wrong. Scale of B A: alpha / r for LoRA (Hu et al. 2021), alpha / sqrt(r) for rsLoRA
(Kalajdzievski 2023).
"""

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import open_file, read_bytes
from pilotlight.engine.weights.checkpoint import read_header
from pilotlight.engine.weights.stored_tensor import StoredTensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 64
_DIGEST_BYTES = 16
_FLOATS = ("F32", "F16", "BF16")
_MOST_HEADER_BYTES = 16 << 20
_MOST_PATTERNS = 4096
# Patterns with at most one repetition, and none of a group: matching them takes at most quadratic time in the name's length.
_PATTERN = re.compile(r"(?:[\w.^$|()\[\]:-]|\\.)*(?:(?<!\))[*+?](?:[\w.^$|()\[\]:-]|\\.)*)?", re.ASCII)
_MOST_CHARACTERS = 300  # limit for a tensor's name or a pattern
_BF16_EXPONENT = 0x7F80  # the exponent's bits, which are all 1 for infinity and NaN
_PIECE = 4 << 20
# _HARMLESS: fields that never affect the computation. _NEUTRAL: fields that do not affect it if they have one of these values.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "alpha_pattern", "lora_dropout", "megatron_config", "megatron_core", "model_type",
    "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # other values change the base model's weights
}
_TOWER = re.compile("vision|audio")
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")


class AdapterError(Exception):
    """An adapter that cannot be used; the message gives the reason."""


class AdaptedProjection(NamedTuple):
    """The part of an adapter for one projection, which adds scale * B [rows, rank] A [rank, columns]."""

    a: str  # name of the tensor A
    b: str  # name of the tensor B
    rank: int
    rows: int
    columns: int
    scale: float


class AdapterDescription(NamedTuple):
    rank: int  # the largest rank of the adapter's projections
    num_bytes: int  # size of the file of tensors
    projections: Mapping[str, AdaptedProjection]  # by the module's name, from `layers` on


def projection_key(module: str) -> str:
    """Return a module's name from `layers.` on: the part before depends on how the model is wrapped.

    A layer of a vision or audio tower keeps its whole name, which no projection of the decoder has.
    """
    at = module.find("layers.")
    return module[at:] if at >= 0 and not _TOWER.search(module, 0, at) else module


def check(
    directory: Path, most_rank: int = MOST_RANK, base: Mapping[str, tuple[int, int]] | None = None
) -> AdapterDescription:
    """Read an adapter's description, and check that all values of its tensors are finite.

    `base`: rows and columns of the projections that adapters may change in a model; None for any model. Raises AdapterError, also for an adapter that
    would change nothing.
    """
    described = describe(directory)
    if described.rank > most_rank:
        raise AdapterError(f"it has rank {described.rank}; ranks up to {most_rank} are supported here")
    for key, adapted in described.projections.items():
        if base is not None:
            check_shape(key, adapted, base.get(key))
    if not any(adapted.scale for adapted in described.projections.values()):
        raise AdapterError(f"{CONFIG}: lora_alpha is 0, so that it changes nothing")
    _check_numbers(directory / WEIGHTS)
    return described


def check_shape(key: str, adapted: AdaptedProjection, base: tuple[int, int] | None) -> None:
    """Raise AdapterError if an adapter's projection does not match that of the model.

    `base`: rows and columns of the model's projection; None if adapters may not change a projection of this name.
    """
    if base is None:
        raise AdapterError(
            f"it changes {key}, which this model does not have, or whose adapters are not supported here"
        )
    if (adapted.rows, adapted.columns) != base:
        there = f"[{adapted.rows}, {adapted.columns}]"
        raise AdapterError(f"it is of another model: {key} is {there} there, and [{base[0]}, {base[1]}] here")


def describe(directory: Path) -> AdapterDescription:
    """Read an adapter's description, without the values of its tensors. Raises AdapterError."""
    config, path = read_config(directory), directory / WEIGHTS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        raise AdapterError(
            f"{directory} has its weights in adapter_model.bin, and a pickled file may run any code: save it as safetensors"
            if pickled
            else f"{directory} has no {WEIGHTS}; an adapter is a directory as PEFT's save_pretrained writes it"
        )
    stored = read_tensors(path)
    tensors = {name: (tensor.dtype, tensor.shape) for name, tensor in sorted(stored.items())}
    projections = dict(_projections(config, tensors))
    if not projections:
        raise AdapterError(f"{path} holds no tensors of an adapter")
    return AdapterDescription(max(each.rank for each in projections.values()), path.stat().st_size, projections)


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the places of an adapter's tensors in its file. Raises AdapterError if it is invalid."""
    try:
        return read_header(path, _MOST_HEADER_BYTES)
    except CheckpointError as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None


def _check_numbers(path: Path) -> None:
    """Raise AdapterError for a tensor with NaN or infinity."""
    import numpy as np  # imported here because a site's start does not need it

    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    for name, tensor in read_tensors(path).items():
        raw = content[tensor.start : tensor.end]
        if tensor.dtype == "BF16":
            is_finite = bool(((raw.view("<u2") & _BF16_EXPONENT) != _BF16_EXPONENT).all())
        else:
            is_finite = bool(np.isfinite(raw.view("<f4" if tensor.dtype == "F32" else "<f2")).all())
        if not is_finite:
            raise AdapterError(f"tensor {name} holds NaN or infinity")


def digest_of(directory: Path) -> str:
    """Return the digest, in hexadecimal, of all bytes of an adapter's files. Raises AdapterError."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    try:
        for name in (CONFIG, WEIGHTS):
            with open_file(directory / name) as file:
                content = blake2b()
                while piece := file.read(_PIECE):
                    content.update(piece)
                digest.update(content.digest())
    except OSError as error:
        raise AdapterError(f"{directory} cannot be read: {error}") from None
    return digest.hexdigest()


def read_config(directory: Path) -> dict[str, Any]:
    """Read an adapter's config. Raises AdapterError if it is not that of a plain low-rank adapter."""
    try:
        config = json.loads(read_bytes(directory / CONFIG, _MOST_HEADER_BYTES))
    except OSError:
        raise AdapterError(f"{directory} has no {CONFIG}; an adapter is a directory as PEFT writes it") from None
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{directory / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError(f"{directory / CONFIG}: peft_type is {kind!r}; adapters are of the type LORA")
    for name, value in config.items():
        neutral = _NEUTRAL.get(name, ())
        if name not in _HARMLESS and value and not any(value is n or value == n for n in neutral):
            raise AdapterError(
                f"{directory / CONFIG}: {name} is {json.dumps(value)[:100]}, which is not supported here"
            )
    return config


def _projections(config: dict[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Any:
    """Yield each projection by its key. Raises AdapterError for tensors that are not a pair of A and B."""
    halves: dict[str, dict[str, str]] = {}
    ranks, alphas = (_patterns(config, field) for field in ("rank_pattern", "alpha_pattern"))
    for name, (dtype, shape) in tensors.items():
        found = _TENSOR.fullmatch(name) if len(name) <= _MOST_CHARACTERS else None
        if found is None:
            raise AdapterError(
                f"tensor {name[:_MOST_CHARACTERS]} is not lora_A or lora_B of a linear layer; nothing else is supported here"
            )
        if dtype not in _FLOATS or len(shape) != 2 or not all(shape):
            raise AdapterError(
                f"tensor {name} has type {dtype} and shape {list(shape)}; it must be a matrix of {', '.join(_FLOATS)}"
            )
        halves.setdefault(found["module"], {})[found["half"]] = name
    for module, names in halves.items():
        if len(names) < 2:
            raise AdapterError(f"{module} has {next(iter(names.values()))} without its other half")
        (rank, columns), (rows, of_b) = tensors[names["A"]][1], tensors[names["B"]][1]
        wanted = _matched(ranks, module, config.get("r"))
        if not (isinstance(wanted, int) and rank == of_b == wanted):
            raise AdapterError(f"{module} has rank {rank} in A and {of_b} in B, and {CONFIG} says {wanted!r}")
        if rank > MOST_RANK:
            raise AdapterError(f"{module} has rank {rank}; adapters of ranks up to {MOST_RANK} are computed")
        alpha = _matched(alphas, module, config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise AdapterError(f"{CONFIG}: lora_alpha of {module} is {alpha!r}; it must be a number")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield projection_key(module), AdaptedProjection(names["A"], names["B"], rank, rows, columns, scale)


def _patterns(config: dict[str, Any], field: str) -> list[tuple[re.Pattern[str], Any]]:
    """Return a field's patterns with their values. They match the end of a module's name, as in PEFT."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict) or len(patterns) > _MOST_PATTERNS:
        raise AdapterError(f"{CONFIG}: {field} must be an object of at most {_MOST_PATTERNS} patterns")
    found = []
    for pattern, value in patterns.items():
        if len(pattern) > _MOST_CHARACTERS or not _PATTERN.fullmatch(pattern):
            sentence = f"{pattern[:_MOST_CHARACTERS]!r}, which repeats more than one part of it, or a group"
            raise AdapterError(f"{CONFIG}: {field} has the pattern {sentence}: name the modules")
        try:
            found.append((re.compile(rf"(.*\.)?({pattern})$"), value))
        except (re.error, RecursionError) as error:
            raise AdapterError(f"{CONFIG}: {field} has the invalid pattern {pattern!r}: {error}") from None
    return found


def _matched(patterns: list[tuple[re.Pattern[str], Any]], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches."""
    return next((value for pattern, value in patterns if pattern.match(module)), default)

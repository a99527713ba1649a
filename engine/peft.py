"""An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors, read without torch and without its numbers.

Says which projections it changes, by what rank and scale, and refuses by name what is not a plain low-rank adapter: then the answers would be others
than those it was trained for. Formulas: LoRA (Hu et al. 2021) scales B A by alpha / r, rsLoRA (Kalajdzievski 2023) by alpha / sqrt(r).
"""

import json
import math
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MOST_RANK = 64
_DIGEST_BYTES = 16
_FLOATS = ("F32", "F16", "BF16")
_PIECE = 4 << 20
# Fields that change nothing of what is computed from the tensors, and fields with the only values that change nothing.
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "alpha_pattern", "lora_dropout", "megatron_config", "megatron_core", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),  # the others change the base's own weights
}
_TENSOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.default)?\.weight")


class AdapterError(Exception):
    """An adapter cannot be used; the sentence says why."""


class AdaptedProjection(NamedTuple):
    """The part of an adapter that changes one projection [rows, columns]: it adds scale * B [rows, rank] A [rank, columns]."""

    a: str  # the tensors' names
    b: str
    rank: int
    rows: int
    columns: int
    scale: float


class AdapterDescription(NamedTuple):
    rank: int  # the largest
    num_bytes: int  # of its tensors' file
    projections: Mapping[str, AdaptedProjection]  # by the module's name, from `layers` on


def projection_key(module: str) -> str:
    """Return a module's name without what stands before its layer, which depends on who wraps the model."""
    at = module.find("layers.")
    return module[at:] if at >= 0 else module


def describe(directory: Path) -> AdapterDescription:
    """Read what an adapter is. Raises AdapterError."""
    from safetensors import SafetensorError, safe_open  # not at a host's start

    config, path = _read_config(directory), directory / WEIGHTS
    if not path.is_file():
        pickled = (directory / "adapter_model.bin").exists()
        raise AdapterError(
            f"{directory} has its weights in adapter_model.bin, and a pickled file may run any code: save it as safetensors"
            if pickled
            else f"{directory} has no {WEIGHTS}; an adapter is a directory as PEFT's save_pretrained writes it"
        )
    try:
        with safe_open(path, framework="np") as file:
            tensors = {
                name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in sorted(file.keys())
            }
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from None
    projections = dict(_projections(config, tensors))
    if not projections:
        raise AdapterError(f"{path} holds no tensors of an adapter")
    return AdapterDescription(max(each.rank for each in projections.values()), path.stat().st_size, projections)


def digest_of(directory: Path) -> str:
    """Return what names an adapter's content, in hexadecimal: of all bytes of its files. Raises AdapterError."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    try:
        for name in (CONFIG, WEIGHTS):
            with (directory / name).open("rb") as file:
                content = blake2b()
                while piece := file.read(_PIECE):
                    content.update(piece)
                digest.update(content.digest())
    except OSError as error:
        raise AdapterError(f"{directory} cannot be read: {error}") from None
    return digest.hexdigest()


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / CONFIG).read_bytes())
    except OSError:
        raise AdapterError(f"{directory} has no {CONFIG}; an adapter is a directory as PEFT writes it") from None
    except ValueError as error:
        raise AdapterError(f"{directory / CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError(f"{directory / CONFIG}: peft_type is {kind!r}; adapters are of the type LORA")
    for name, value in config.items():
        neutral = _NEUTRAL.get(name, ())
        if name not in _HARMLESS and value and not any(value is n or value == n for n in neutral):
            raise AdapterError(f"{directory / CONFIG}: {name} is {json.dumps(value)[:100]}, which is not computed here")
    return config


def _projections(config: dict[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> Any:
    """Yield each projection by its key. Raises AdapterError for tensors that are not A and B of one."""
    halves: dict[str, dict[str, str]] = {}
    for name, (dtype, shape) in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise AdapterError(
                f"tensor {name} is no lora_A or lora_B of a linear layer, and nothing else is computed here"
            )
        if dtype not in _FLOATS or len(shape) != 2 or not all(shape):
            raise AdapterError(
                f"tensor {name} has type {dtype} and shape {list(shape)}; wanted is a matrix of {', '.join(_FLOATS)}"
            )
        halves.setdefault(found["module"], {})[found["half"]] = name
    for module, names in halves.items():
        if len(names) < 2:
            raise AdapterError(f"{module} has {next(iter(names.values()))} without its other half")
        (rank, columns), (rows, of_b) = tensors[names["A"]][1], tensors[names["B"]][1]
        wanted = _pattern(config, "rank_pattern", module, config.get("r"))
        if not (isinstance(wanted, int) and rank == of_b == wanted):
            raise AdapterError(f"{module} has rank {rank} in A and {of_b} in B, and {CONFIG} says {wanted!r}")
        if rank > MOST_RANK:
            raise AdapterError(f"{module} has rank {rank}; adapters of ranks up to {MOST_RANK} are computed")
        alpha = _pattern(config, "alpha_pattern", module, config.get("lora_alpha"))
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
            raise AdapterError(f"{CONFIG}: lora_alpha of {module} is {alpha!r}; it must be a number")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        yield projection_key(module), AdaptedProjection(names["A"], names["B"], rank, rows, columns, scale)


def _pattern(config: dict[str, Any], field: str, module: str, default: Any) -> Any:
    """Return the value of the first pattern that the end of a module's name matches, as PEFT looks it up."""
    patterns = config.get(field) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{CONFIG}: {field} must be an object")
    for pattern, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        except re.error as error:
            raise AdapterError(f"{CONFIG}: {field} has the pattern {pattern!r}, which is none: {error}") from None
    return default

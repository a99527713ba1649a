"""Sizes of matrices in checkpoint formats, and the matrices that a config.json lists in a format.

engine/weights/formats reads the same checkpoints; this module knows sizes only, and no tensors.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.description.tensor_sizes import WeightShape
from pilotlight.engine.weights.config import positive_int, quantization, quantization_method, require_modelopt_fp8

_BLOCK = 32  # columns per block of four-bit codes; rows are padded to whole blocks (kernels/matrices/int4.py)
_PACKED = ("attention", "dense", "experts", "shared_experts")
_OF_GGUF = (*_PACKED, "embedding", "layer_inputs", "head")
_LOSSLESS_GROUP = (
    128  # columns per group of bf16 in 12 bits; rows are padded to half groups (kernels/matrices/lossless.py)
)
_LOSSLESS_ROW_BYTES = 2.5  # bytes that the palette and the count of escapes of one row take
_LOSSLESS_WORTH = 0.9  # a matrix that would take more than this share of its plain size stays plain

_PATTERN = "re:"  # prefix of a regular expression in a list of names
# Limits of the number of untrusted regular expressions, and of characters and repetitions in each: with three, matching a name takes cubic time.
_MOST_PATTERNS, _MOST_CHARACTERS, _MOST_REPEATED = 64, 300, 3
_REPEATED = re.compile(r"(?<!\()[*+?{]")
_GROUP_REPEATED = re.compile(r"\)[*+?{]")


class Quantization(NamedTuple):
    method: str
    bits: float  # bits per value; for GGUF the mean of its kinds, including scales
    columns: int | None  # columns per scale; None for a whole row
    rows: int = 1  # rows per scale
    scale_bytes: int = 2
    zero_bytes: int = 0
    ignored: tuple[str, ...] = ()  # as config.json lists them: names, parts of names, or "re:" and a pattern
    of_experts: bool = False  # only experts are in the format
    is_float: bool = False
    on_cpu_alone: bool = False  # only products on a CPU read the format

    def holds(self, shape: WeightShape) -> bool:
        """Return whether the checkpoint has this matrix in the format."""
        packed = _OF_GGUF if self.method == "gguf" else _PACKED
        if not shape.columns or shape.part not in packed or (self.of_experts and shape.part != "experts"):
            return False
        return not any(_matches(pattern, shape.name) for pattern in self.ignored)

    def stays_packed(self, on_cpu: bool) -> bool:
        """Return whether products read such matrices without unpacking them.

        On a CPU this needs the C library and the vector instructions that it uses.
        """
        return on_cpu if self.on_cpu_alone else self.bits == 4 or self.is_float != on_cpu

    def require_whole_groups(self, shape: WeightShape, columns: int) -> None:
        """Raise CheckpointError if the columns of a rank end within a group under one scale."""
        group = self.columns
        if group and columns < shape.columns and columns % group:
            fits = [str(n) for n in range(1, shape.columns // group + 1) if shape.columns % (n * group) == 0]
            raise CheckpointError(
                f"{shape.name} has {shape.columns} columns in groups of {group} under one scale, but a rank would have {columns}; "
                f"possible numbers of ranks: {', '.join(fits)}"
            )

    def num_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of one matrix."""
        groups = -(-columns // self.columns) if self.columns else 1
        codes = -(-columns // _BLOCK) * _BLOCK if self.bits == 4 else columns
        scales = -(-rows // self.rows) * groups * self.scale_bytes
        return int(rows * codes * self.bits) // 8 + scales + rows * groups * self.zero_bytes


def lossless_bytes(rows: int, columns: int) -> int:
    """Return the bytes of a plain bf16 matrix in 12 bits, or in its plain form if 12 bits save too little."""
    groups, rest = divmod(columns, _LOSSLESS_GROUP)
    codes = groups * _LOSSLESS_GROUP * 3 // 2 + (192 if rest > _LOSSLESS_GROUP // 2 else 128 if rest else 0)
    # escapes are not counted: in Ember 31 of a million weights are escapes, of four bytes each
    taken = int(rows * (codes + _LOSSLESS_ROW_BYTES))
    return taken if taken <= _LOSSLESS_WORTH * 2 * rows * columns else 2 * rows * columns


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the format that a config.json describes for its weights.

    Returns None if they are plain, or in an unknown format.
    """
    method, described = quantization_method(config), quantization(config)
    if method is None or not isinstance(described, dict):
        return None
    ignored = _ignored(described)
    if method == "mxfp4":
        return Quantization(method, 4, _BLOCK, scale_bytes=1, of_experts=True)
    if method == "modelopt":
        require_modelopt_fp8(described)
    if method in ("fp8", "modelopt"):
        rows, columns = described.get("weight_block_size") or (1, None)
        return Quantization(method, 8, columns, rows, 4, ignored=ignored, is_float=True)
    if method in ("gptq", "awq"):
        said = described.get("group_size", described.get("q_group_size"))
        group = None if said == -1 else positive_int({"group_size": said}, "group_size", 128)
        has_zeros = bool(described.get("zero_point", True)) if method == "awq" else not described.get("sym", True)
        return Quantization(method, 4, group, zero_bytes=int(has_zeros), ignored=ignored)
    if method == "gguf" and isinstance(bits := described.get("bits"), int | float):
        return Quantization(method, bits, _BLOCK, scale_bytes=0, on_cpu_alone=True)
    if method != "compressed-tensors":
        return None
    groups = described.get("config_groups")
    weights = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    if not weights or not isinstance(weights[0], dict):
        return None
    bits, block = positive_int(weights[0], "num_bits", 8), weights[0].get("block_structure")
    if bits == 8 and weights[0].get("type") == "float":
        rows, columns = block or (1, None)
        return Quantization(method, 8, columns, rows, 4, ignored=ignored, is_float=True)
    group = weights[0].get("group_size")
    zero_bytes = int(not weights[0].get("symmetric", True))
    return Quantization(method, bits, group if group and group > 0 else None, zero_bytes=zero_bytes, ignored=ignored)


def _ignored(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the matrices that stay plain.

    Raises CheckpointError for patterns whose matching could take more than milliseconds for a name of 100 characters.
    """
    ignored = tuple(map(str, described.get("ignore") or described.get("modules_to_not_convert") or ()))
    patterns = [entry.removeprefix(_PATTERN) for entry in ignored if entry.startswith(_PATTERN)]
    if len(patterns) > _MOST_PATTERNS:
        raise CheckpointError(
            f"quantization_config has {len(patterns)} patterns to ignore, of at most {_MOST_PATTERNS}"
        )
    for pattern in patterns:
        if (
            len(pattern) > _MOST_CHARACTERS
            or len(_REPEATED.findall(pattern)) > _MOST_REPEATED
            or _GROUP_REPEATED.search(pattern)
        ):
            raise CheckpointError(
                f"quantization_config ignores the pattern {pattern[:_MOST_CHARACTERS]!r}, which repeats a group or more than {_MOST_REPEATED} parts; "
                "list the modules' names"
            )
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"quantization_config has the invalid pattern {pattern!r}: {error}") from None
    return ignored


def _matches(pattern: str, name: str) -> bool:
    if pattern.startswith(_PATTERN):
        return re.match(pattern.removeprefix(_PATTERN), name) is not None
    return pattern == name or f".{pattern}." in f".{name}."

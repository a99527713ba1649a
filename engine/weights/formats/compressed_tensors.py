"""The quantization_config of compressed-tensors: integers or FP8, in the same way for all matrices."""

from collections.abc import Mapping
from typing import Any

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.formats.format import WeightFormat
from pilotlight.engine.weights.formats.fp8 import Fp8Format, read_block
from pilotlight.engine.weights.formats.int4 import Int4Format, read_group
from pilotlight.engine.weights.formats.int4_layouts import CompressedTensors
from pilotlight.engine.weights.formats.int8 import Int8Format


def read_compressed_tensors(described: Mapping[str, Any]) -> WeightFormat:
    form = described.get("format")
    groups = described.get("config_groups")
    schemes = [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []
    weights = [scheme["weights"] for scheme in schemes if isinstance(scheme.get("weights"), dict)]
    if not weights:
        raise CheckpointError("config.json's quantization_config has no config_groups with weights")
    if any(weight != weights[0] for weight in weights[1:]):
        raise CheckpointError(
            "config.json's quantization_config quantizes some matrices differently from others; supported is one way for all"
        )
    weight = weights[0]
    bits, kind, strategy = weight.get("num_bits"), weight.get("type"), weight.get("strategy")
    described_as = f"format {form!r} with {bits!r} bits of type {kind!r} by {strategy!r}"
    if form in ("pack-quantized", "int-quantized") and kind == "int" and strategy in ("group", "channel"):
        if any(scheme.get("input_activations") for scheme in schemes):
            raise CheckpointError(
                f"config.json's quantization_config quantizes activations in addition to weights of {bits} bits; supported are weights alone"
            )
        group = read_group(weight.get("group_size") if strategy == "group" else -1)
        has_zeros, in_words = not weight.get("symmetric", True), form == "pack-quantized"
        if bits == 4 and in_words:
            return Int4Format(CompressedTensors(), group, has_zeros, has_zeros)
        if bits == 8 and not has_zeros:
            return Int8Format(group, in_words)
    if (
        form in ("float-quantized", "naive-quantized")
        and (bits, kind) == (8, "float")
        and strategy in ("tensor", "channel", "block")
    ):
        return Fp8Format(read_block(weight.get("block_structure")) if strategy == "block" else None)
    raise CheckpointError(
        f"config.json's quantization_config has {described_as}; supported are pack-quantized with 4 bits of int, or 8 without zero points, "
        "by group or channel, int-quantized with 8 likewise, and float-quantized with 8 bits of float by tensor, channel or block"
    )

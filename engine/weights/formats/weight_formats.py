"""The formats of weights, by their names in config.json. A new format is a file, and a line here."""

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from pilotlight.engine.weights.config import quantization

if TYPE_CHECKING:
    from pilotlight.engine.weights.formats.format import WeightFormat

# The module and function that parses a quantization_config, by its quant_method; imported only for a model that needs it.
FORMATS = {
    "compressed-tensors": "pilotlight.engine.weights.formats.compressed_tensors:read_compressed_tensors",
    "gptq": "pilotlight.engine.weights.formats.int4:read_gptq",
    "awq": "pilotlight.engine.weights.formats.int4:read_awq",
    "fp8": "pilotlight.engine.weights.formats.fp8:read_fp8",
    "modelopt": "pilotlight.engine.weights.formats.fp8:read_modelopt",
    "gguf": "pilotlight.engine.weights.formats.gguf:read_gguf",
    "mxfp4": "pilotlight.engine.weights.formats.mxfp4:read_mxfp4",
}
OF_STACKS = frozenset({"mxfp4"})  # formats with all experts in one tensor, which only some model families support


def read_format(config: Mapping[str, Any]) -> "WeightFormat | None":
    """Return the format of a checkpoint's quantized matrices, or None if all are plain.

    Returns None for an unknown format, too. An unquantized matrix is recognised by its plain tensor, so the lists of exceptions in config.json are
    ignored.
    """
    described = quantization(config)
    place = FORMATS.get(str(described.get("quant_method"))) if isinstance(described, dict) else None
    if place is None:
        return None
    module, _, name = place.partition(":")
    format: WeightFormat = getattr(import_module(module), name)(described)
    return format

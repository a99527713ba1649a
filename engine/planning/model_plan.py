"""A model for planning: its config, format and dtype, and the bytes of its weights by part and rank.

Read from a directory or a config.json alone; no weights are needed. If they are present, their headers show how they are stored.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from pilotlight.engine.adapters.peft import projection_key
from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.plain_files import open_file
from pilotlight.engine.api.protocol import KvDtype
from pilotlight.engine.description.class_labels import is_classifier, score_weights
from pilotlight.engine.description.config_registry import PARSERS, ArchitectureConfig, find_architecture
from pilotlight.engine.description.decoder_config import DecoderConfig
from pilotlight.engine.description.tensor_sizes import Part, WeightShape
from pilotlight.engine.kv.pool.layout import CachedLayer
from pilotlight.engine.planning.parallelism import ALONE, Parallelism, RankPlace, balanced_stages
from pilotlight.engine.planning.quantization import Quantization, lossless_bytes, read_quantization
from pilotlight.engine.weights.bundles.bundle import WeightBundleError, read_bundle
from pilotlight.engine.weights.checkpoint import index_checkpoint, packed_file, read_json, weight_files
from pilotlight.engine.weights.config import quantization_method, refusing_types
from pilotlight.engine.weights.pooling_recipe import read_recipe

# Below this size a CPU computes in fp32: results can then be tested for exactness, and the weights still fit its caches.
SMALL_MODEL_PARAMETERS = 100_000_000
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# For the division of a model into stages: the number of decodes in a typical step, and the time per byte of a part relative to a feed-forward.
# Measured on an AMD EPYC (load_tests/results/2026-11-23-amd-epyc-stages.json), with 128 tokens of context.
_DECODES = 16
_TIME_PER_BYTE: dict[Part, float] = {"attention": 2.2, "head": 0.8, "embedding": 0.0, "norms": 0.0}


class PlannedModel(NamedTuple):
    architecture: str
    config: ArchitectureConfig
    outer: tuple[WeightShape, ...]  # tensors before and after the layers
    layers: tuple[tuple[WeightShape, ...], ...]  # the weights of each layer
    quantization: Quantization | None
    dtype: str  # type of plain weights, activations and, if `kv_dtype` is auto, the KV cache
    pools: bool = False  # the model embeds or classifies texts, and computes no logits of tokens
    kv_dtype: KvDtype = "auto"
    is_lossless: bool = False  # on a CPU, plain bf16 matrices are kept in 12 bits

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def num_experts(self) -> int:
        return max((shape.experts for _, shape in self.weights()), default=0)

    def stages(self, num_stages: int) -> list[range]:
        """Return each stage's layers, so that decode steps take all stages about equally long.

        Raises CheckpointError if a stage cannot be computed without layers of another one.
        """
        if num_stages == 1:
            return [range(len(self.layers))]
        costs = tuple(sum(map(self._step_cost, layer)) for layer in self.layers)
        # an embedding that is also used as the head costs as much as a separate head
        head = WeightShape("head", "", self.config.vocab_size, self.config.hidden_size)
        stages = balanced_stages(costs, 0.0 if self.pools else self._step_cost(head), num_stages)
        if isinstance(self.config, DecoderConfig):
            for layers in stages:
                self.config.check_stage(layers)
        return stages

    def weights(self) -> Iterator[tuple[int | None, WeightShape]]:
        """Yield every tensor with its layer, or with None if it belongs to no layer."""
        yield from ((None, shape) for shape in self.outer)
        for i, layer in enumerate(self.layers):
            yield from ((i, shape) for shape in layer)

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (rows, columns) of the projections that adapters may change, by their projection_key."""
        if not (isinstance(self.config, DecoderConfig) and self.config.takes_adapters):
            return {}
        return {projection_key(each.name): each[2:4] for layer in self.layers for each in layer if each.takes_adapters}

    def cached_layers(self, place: RankPlace) -> list[CachedLayer]:
        """Return this rank's part of the KV cache of each layer of its stage."""
        layers = self.config.cached_layers
        if not layers:
            return []
        stage, num_layers = self.stages(place.parallelism.pp)[place.stage], len(self.layers)
        return [layer.part_of(place.shard) for i, layer in enumerate(layers) if i % num_layers in stage]

    def weight_bytes(self, place: RankPlace, on_cpu: bool) -> dict[Part, int]:
        """Return the bytes of the rank's weights, by part. Raises CheckpointError if a split does not divide."""
        layers, pp = self.stages(place.parallelism.pp)[place.stage], place.parallelism.pp
        found: Counter[Part] = Counter()
        for layer, shape in self.weights():
            if layer in layers if layer is not None else _is_of_stage(shape, place.stage, pp):
                found[shape.part] += self._bytes_of(shape, place, on_cpu)
        return dict(found)

    def table_bytes(self, context_length: int) -> int:
        """Return the bytes of the rotary tables."""
        return 4 * context_length * self.config.rotary_numbers

    def _step_cost(self, shape: WeightShape) -> float:
        """Return the cost of a tensor in a decode step.

        The unit is the time per byte of a dense feed-forward. Plain tensors count as bf16, so the result does not depend on `dtype`.
        """
        format = self.quantization
        num_bytes = ITEM_BYTES["bfloat16"] * shape.rows * shape.columns
        if format is not None and format.holds(shape) and format.stays_packed(on_cpu=False) and not shape.is_unpacked:
            num_bytes = format.num_bytes(shape.rows, shape.columns)
        return num_bytes * shape.num_read(_DECODES) * _TIME_PER_BYTE.get(shape.part, 1.0)

    def _bytes_of(self, shape: WeightShape, place: RankPlace, on_cpu: bool) -> int:
        count, rows, columns = place.part_of(shape)
        format = self.quantization
        if format is not None and format.holds(shape):
            format.require_whole_groups(shape, columns)
            if format.stays_packed(on_cpu) and not shape.is_unpacked:
                return count * format.num_bytes(rows, columns)
        if (
            self.is_lossless
            and on_cpu
            and format is None
            and columns
            and self.dtype == "bfloat16"
            and not shape.is_wide
        ):
            return count * lossless_bytes(rows, columns)
        return count * rows * max(1, columns) * (4 if shape.is_wide else self.item_bytes)


def _is_of_stage(shape: WeightShape, stage: int, num_stages: int) -> bool:
    return stage == (num_stages - 1 if shape.part == "norms" else 0)


def read_model(path: Path, dtype: str = "auto", on_cpu: bool = False) -> PlannedModel:
    """Read a checkpoint's directory, or a config.json alone. Raises CheckpointError."""
    directory = path if path.is_dir() else path.parent
    config = read_json(directory, "config.json" if path.is_dir() else path.name, wanted=("architectures",))
    pools = False
    if path.is_dir() and (directory / "modules.json").exists():
        recipe = read_recipe(directory, config)
        pools = recipe is not None
        if recipe is not None and not recipe.keeps_head:
            config = {**config, "tie_word_embeddings": True}
    return plan_model(config, dtype, on_cpu, _stored(directory) if path.is_dir() else None, pools)


def plan_model(
    config: Mapping[str, Any],
    dtype: str = "auto",
    on_cpu: bool = False,
    stored: frozenset[str] | None = None,
    pools: bool = False,
) -> PlannedModel:
    """Return the model that a config.json describes. Raises CheckpointError.

    `stored`: the types of the stored tensors, if they are present. `pools`: the model embeds or classifies texts.
    """
    architecture = find_architecture(config)
    if is_classifier(config):
        config, pools = {**config, "tie_word_embeddings": True}, True
    text = config.get("text_config") or {}
    with refusing_types():
        quantization = read_quantization(config)
    parsed = PARSERS[architecture](config)
    layers = tuple(tuple(parsed.layer_weights(i, f"model.layers.{i}")) for i in range(parsed.num_layers))
    outer = (*parsed.outer_weights, *score_weights(config, architecture, parsed.hidden_size))
    model = PlannedModel(architecture, parsed, outer, layers, quantization, "bfloat16", pools)
    if dtype != "auto":
        return model._replace(dtype=dtype)
    if stored is None:
        said = text.get("torch_dtype") or config.get("torch_dtype") or config.get("dtype") or "bfloat16"
        stored = frozenset({"F32"} if said == "float32" else {"BF16"})
    num_parameters = sum(shape.numbers for _, shape in model.weights())
    return model._replace(dtype=choose_dtype_name(num_parameters, stored, on_cpu))


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the supported architecture that a config.json names, or "" if it names none."""
    try:
        return find_architecture(config)
    except CheckpointError:
        return ""


def choose_dtype_name(num_parameters: int, stored: frozenset[str], on_cpu: bool) -> str:
    """Return the type that "auto" selects for a checkpoint, from its size and its stored types."""
    if on_cpu and num_parameters < SMALL_MODEL_PARAMETERS:
        return "float32"
    # Of the two 16-bit types only bf16 has fp32's range, which activations of large models need.
    return "float32" if stored - {"I64"} == {"F32"} else "bfloat16"


def planned_weights_bytes(directory: Path, dtype: str, *, on_cpu: bool, degrees: Parallelism = ALONE) -> int:
    """Return the most bytes that a model's weights will take on one of its devices.

    Counts the values in the model's files if these are plain and present, and otherwise those that config.json implies. Returns 0 on an error, which
    the load will report.
    """
    try:
        if (packed := packed_file(directory)) is not None:
            return _packed_bytes(packed)
        has_config, has_files = (directory / "config.json").exists(), bool(weight_files(directory))
        config = read_json(directory, "config.json") if has_config else {}
        if has_config and (degrees.size > 1 or not has_files or quantization_method(config) is not None):
            model = read_model(directory, dtype, on_cpu)
            return max(sum(model.weight_bytes(place, on_cpu=on_cpu).values()) for place in degrees.stage_places)
        stored = index_checkpoint(directory).values()
        numbers, dtypes = sum(prod(tensor.shape) for tensor in stored), frozenset(tensor.dtype for tensor in stored)
        return numbers * ITEM_BYTES[choose_dtype_name(numbers, dtypes, on_cpu) if dtype == "auto" else dtype]
    except (CheckpointError, OSError, ValueError):
        return 0


def _packed_bytes(packed: Path) -> int:
    """Return the bytes that a bundle takes in memory: the size of the file, or of its decoded chunks."""
    with open_file(packed) as file:
        try:
            bundle = read_bundle(file.fileno())
        except WeightBundleError:  # the load will report the error
            return packed.stat().st_size
    return sum(spec.num_bytes for spec in bundle.specs) if bundle.coded else bundle.size


def _stored(directory: Path) -> frozenset[str] | None:
    """Return the types of the checkpoint's tensors; None if it is packed or has no files yet."""
    if packed_file(directory) is not None or not weight_files(directory):
        return None
    return frozenset(tensor.dtype for tensor in index_checkpoint(directory).values())

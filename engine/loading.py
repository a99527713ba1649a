"""From a ModelSpec to an engine that is ready to step: configuration, arithmetic, a place in the arena, weights, one
warm-up.

The first module on the way that imports torch; a host imports it in its loading thread, when the socket is already
bound.
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.engine import Engine
from engine.errors import CheckpointError, StepError
from engine.kv.arena import Arena
from engine.kv.lending import Account, Lending, NoSlabsError, Reservation
from engine.kv.prefix_index import CacheIdentity
from engine.kv.shared_tiers import SharedTiers
from engine.layers.weights import WeightLoader
from engine.models.registry import CacheShape, Family, Model, ModelConfig, find_family
from engine.plan import Limits
from engine.protocol import HostConfig, ModelInfo, ModelSpec
from engine.rehearsal import Rehearsal
from engine.runner import ModelRunner
from engine.warm_up import BackgroundWarmUp
from engine.weights.config import eos_token_ids, read_config
from engine.weights.embedding import EmbeddingRecipe, read_recipe
from engine.weights.fingerprint import fingerprint
from engine.weights.quantization import Quantization, read_quantization
from engine.weights.reader import CheckpointReader, ReadingProgress
from engine.weights.unread import UnreadCheckpoint
from kernels.cpu import library as cpu_kernels
from kernels.cpu import pages

# Below this size a CPU computes in fp32: exactness is then testable, and the weights still fit its caches as well as
# bf16 ones would.
SMALL_MODEL_PARAMETERS = 100_000_000
_WARM_UP_TOKENS = 8
# Of a KV block's bytes; raise it when they come to mean something else, so that no tier gives out the old ones.
_LAYOUT = 1
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KvMemory(NamedTuple):
    """One allocation, and who has which part of it."""

    arena: Arena
    lending: Lending


class LoadedModel(NamedTuple):
    spec: ModelSpec
    engine: Engine
    place: Account | Reservation | None  # None: an encoder, which caches nothing

    def is_seated(self) -> bool:
        """Its cache is its own: what others had there, they have left."""
        return not isinstance(self.place, Reservation) or self.place.is_complete()

    def close(self) -> None:
        """It is no longer used: its part of the arena may be borrowed again."""
        self.engine.close()
        if self.place is not None:
            self.place.close()


def make_kv_memory(config: HostConfig) -> KvMemory:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if device.type == "cpu":
        cpu_kernels.start()
    arena = Arena(config.kv_bytes, device)
    pages.prefer_huge(arena.span(0, arena.total_bytes))
    return KvMemory(arena, Lending(arena.num_slabs, arena.slab_bytes, arena.clear))


def choose_device(name: str) -> torch.device:
    """ "auto" is the first CUDA device that works here, else the CPU. Raises CheckpointError for a device there is not."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(f"device {name!r} cannot be used here: {reason}; say auto, cpu, cuda or cuda:N") from None
    return device


@torch.inference_mode()
def load_model(
    spec: ModelSpec,
    host: HostConfig,
    memory: KvMemory,
    on_progress: ReadingProgress | None = None,
    tiers: SharedTiers | None = None,
) -> LoadedModel:
    started = time.perf_counter()
    directory = Path(spec.path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; a model is a directory with config.json and *.safetensors")
    raw_config = read_config(directory)
    recipe = read_recipe(directory, raw_config)
    if recipe is not None:  # nobody asks for its logits: a head of its own would only take memory
        raw_config["tie_word_embeddings"] = True
    family = find_family(raw_config)
    config = family.parse_config(raw_config)
    reader = CheckpointReader(directory, on_progress)
    if config.num_layers == 0:
        assert recipe is not None, "only embedding models cache nothing"
        return _load_encoder(spec, host, memory.arena.device, family, config, recipe, reader, started)
    longest = _longest(config, recipe)
    try:
        dtype = _choose_dtype(spec, reader, memory.arena.device)
        block = _block_shape(config, host.block_size)
        block_bytes = math.prod(block) * dtype.itemsize
        place = _find_place(spec, host, memory, block_bytes)
        try:
            if isinstance(place, Account):
                num_blocks, first_slab, num_seen = place.max_blocks, 0, place.grid.capacity
            else:
                num_blocks = num_seen = _blocks_of(spec.kv_tokens, host.block_size)
                first_slab = place.slabs.start
            context_length = min(longest, num_blocks * host.block_size)
            if context_length < 2:
                raise CheckpointError(f"{spec.name} has room for {context_length} token; raise kv_tokens or kv_gib")
            warm_up = _start_warm_up(
                spec,
                family,
                config,
                dtype,
                context_length,
                host.block_size,
                recipe,
                memory.arena.device,
                read_quantization(raw_config),
            )
            loader = _weights(reader, dtype, memory.arena.device, raw_config)
            model = family.load(config, loader, context_length)
            reader.finish()
            warm_up.wait()
            _warm_up(model, recipe, block, dtype, memory.arena.device, config.vocab_size, context_length)
            cache = memory.arena.span(first_slab, num_seen * block_bytes)
            runner = _runner(model, cache.view(dtype).view(num_seen, *block), recipe)
            info = ModelInfo(
                name=spec.name,
                context_length=context_length,
                vocab_size=config.vocab_size,
                eos_token_ids=eos_token_ids(directory, raw_config),
                dtype=str(dtype).removeprefix("torch."),
                block_size=host.block_size,
                total_blocks=num_blocks,
                weights_bytes=loader.loaded_bytes,
                load_s=time.perf_counter() - started,
                pooling=recipe and recipe.pooling,
                embedding_size=config.hidden_size if recipe else 0,
            )
            limits = Limits(host.block_size, host.max_num_batched_tokens, host.max_num_seqs, host.max_waiting)
            account = place if isinstance(place, Account) else None
            layout = f"{_LAYOUT}:{block}:{memory.arena.device.type}"
            weights = _fingerprint(directory) if tiers else b""
            identity = CacheIdentity(spec.name, info.dtype, host.block_size, layout, weights)
            kept = tiers.cache_for(spec.name, runner.kv_cache, host.block_size) if tiers else None
            return LoadedModel(spec, Engine(info, runner, limits, account, identity=identity, tiers=kept), place)
        except BaseException:
            place.close()
            raise
    except StepError as error:
        raise CheckpointError(str(error)) from error
    finally:
        reader.close()


def _fingerprint(directory: Path) -> bytes:
    try:
        return fingerprint(directory)
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be read again for its fingerprint: {error}") from error


def _load_encoder(
    spec: ModelSpec,
    host: HostConfig,
    device: torch.device,
    family: Family,
    config: ModelConfig,
    recipe: EmbeddingRecipe,
    reader: CheckpointReader,
    started: float,
) -> LoadedModel:
    """One that caches nothing: to the scheduler, a block is a text at work, and there are as many as may run at once."""
    try:
        dtype = _choose_dtype(spec, reader, device)
        context_length = _longest(config, recipe)
        warm_up = _start_warm_up(spec, family, config, dtype, context_length, context_length, recipe, device)
        model = family.load(config, WeightLoader(reader, dtype, device), context_length)
        reader.finish()
        warm_up.wait()
        cache = torch.empty(host.max_num_seqs, 0, 2, context_length, 1, 1, dtype=dtype, device=device)
        runner = _runner(model, cache, recipe)
        runner.warm_up([i % config.vocab_size for i in range(1, 1 + min(_WARM_UP_TOKENS, context_length))])
    except StepError as error:
        raise CheckpointError(str(error)) from error
    finally:
        reader.close()
    info = ModelInfo(
        name=spec.name,
        context_length=context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        dtype=str(dtype).removeprefix("torch."),
        block_size=context_length,
        total_blocks=host.max_num_seqs,
        weights_bytes=reader.num_parameters * dtype.itemsize,
        load_s=time.perf_counter() - started,
        pooling=recipe.pooling,
        embedding_size=config.hidden_size,
    )
    limits = Limits(context_length, host.max_num_batched_tokens, host.max_num_seqs, host.max_waiting, is_whole=True)
    return LoadedModel(spec, Engine(info, runner, limits), place=None)


def _weights(
    reader: CheckpointReader, dtype: torch.dtype, device: torch.device, config: Mapping[str, Any]
) -> WeightLoader:
    reader.skip(r".*\.[kv]_scale")  # of a KV cache in fewer bits than ours
    return WeightLoader(reader, dtype, device, read_quantization(config))


def _start_warm_up(
    spec: ModelSpec,
    family: Family,
    config: ModelConfig,
    dtype: torch.dtype,
    context_length: int,
    block_size: int,
    recipe: EmbeddingRecipe | None,
    device: torch.device,
    quantization: Quantization | None = None,
) -> BackgroundWarmUp:
    def rehearsal() -> Rehearsal:
        reader = UnreadCheckpoint.open(Path(spec.path))
        return Rehearsal(
            family, config, reader, dtype, context_length, block_size, recipe and recipe.pooling, quantization
        )

    return BackgroundWarmUp(spec.name, rehearsal, device)


def _runner(model: Model, cache: torch.Tensor, recipe: EmbeddingRecipe | None) -> ModelRunner:
    return (
        ModelRunner(model, cache) if recipe is None else ModelRunner(model, cache, recipe.pooling, recipe.is_normalized)
    )


def _longest(config: ModelConfig, recipe: EmbeddingRecipe | None) -> int:
    most = recipe.max_tokens if recipe is not None else None
    return config.context_length if most is None else min(most, config.context_length)


def _choose_dtype(spec: ModelSpec, reader: CheckpointReader, device: torch.device) -> torch.dtype:
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    if device.type == "cpu" and reader.num_parameters < SMALL_MODEL_PARAMETERS:
        return torch.float32
    # Of the two 16-bit types only bf16 has fp32's range, which activations of large models need.
    return torch.float32 if reader.dtypes - {"I64"} == {"F32"} else torch.bfloat16


def _find_place(spec: ModelSpec, host: HostConfig, memory: KvMemory, block_bytes: int) -> Account | Reservation:
    lending = memory.lending
    try:
        if spec.kv_tokens is None:
            return lending.open(spec.name, block_bytes)
        wanted = _blocks_of(spec.kv_tokens, host.block_size) * block_bytes
        available = lending.largest_run * lending.slab_bytes
        if not 0 < wanted <= available:
            raise CheckpointError(
                f"{spec.name} asks for {spec.kv_tokens} tokens of KV cache, {wanted} bytes; "
                f"the arena can give {available} in one piece: lower kv_tokens or raise kv_gib"
            )
        return lending.reserve(spec.name, -(-wanted // lending.slab_bytes))
    except NoSlabsError as error:
        raise CheckpointError(
            f"the KV arena of {memory.arena.total_bytes} bytes has no room for {spec.name}: {error}; "
            "give the host more KV memory (kv_gib), lower block_size, or change what models have of their own (kv_tokens)"
        ) from error


def _blocks_of(kv_tokens: int | None, block_size: int) -> int:
    return -(-(kv_tokens or 0) // block_size)


def _block_shape(shape: CacheShape, block_size: int) -> tuple[int, ...]:
    return (shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)


def _warm_up(
    model: Model,
    recipe: EmbeddingRecipe | None,
    block: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    context_length: int,
) -> None:
    """In a cache of its own: the arena's blocks may be at work for other models."""
    # Not token 0: that is often a padding token whose embedding is zero, which would prove nothing.
    prompt = [i % vocab_size for i in range(1, 1 + min(_WARM_UP_TOKENS, context_length - 1))]
    num_blocks = -(-(len(prompt) + 1) // block[2])
    _runner(model, torch.zeros(num_blocks, *block, dtype=dtype, device=device), recipe).warm_up(prompt)

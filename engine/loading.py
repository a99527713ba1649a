"""From a ModelSpec to an engine that is ready to step: configuration, arithmetic, KV slab, weights, one warm-up.

The first module on the way that imports torch; a host imports it in its loading thread, when the socket is already
bound.
"""

import time
from pathlib import Path
from typing import NamedTuple

import torch

from engine.engine import Engine
from engine.errors import CheckpointError, StepError
from engine.kv.arena import ALIGNMENT, Arena, ArenaFullError, Slab
from engine.layers.weights import WeightLoader
from engine.models.registry import CacheShape, find_family
from engine.protocol import HostConfig, ModelInfo, ModelSpec
from engine.runner import ModelRunner
from engine.scheduler import Limits
from engine.weights.config import eos_token_ids, read_config
from engine.weights.reader import CheckpointReader, ReadingProgress
from kernels.cpu import library as cpu_kernels
from kernels.cpu import pages

# Below this size a CPU computes in fp32: exactness is then testable, and the weights still fit its caches as well as
# bf16 ones would.
SMALL_MODEL_PARAMETERS = 100_000_000
_WARM_UP_TOKENS = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class LoadedModel(NamedTuple):
    spec: ModelSpec
    engine: Engine
    slab: Slab


def make_arena(config: HostConfig) -> Arena:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    if device.type == "cpu":
        cpu_kernels.start()
    return Arena(config.kv_bytes, device)


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
    spec: ModelSpec, host: HostConfig, arena: Arena, num_sharing: int, on_progress: ReadingProgress | None = None
) -> LoadedModel:
    """`num_sharing`: models, this one included, among which what is left of the arena is divided."""
    started = time.perf_counter()
    directory = Path(spec.path)
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is no directory; a model is a directory with config.json and *.safetensors")
    raw_config = read_config(directory)
    family = find_family(raw_config)
    config = family.parse_config(raw_config)
    reader = CheckpointReader(directory, on_progress)
    try:
        dtype = _choose_dtype(spec, reader, arena.device)
        num_blocks = _choose_num_blocks(spec, host, config, config.context_length, dtype, arena, num_sharing)
        slab = arena.borrow(num_blocks * _block_bytes(config, host.block_size, dtype))
        pages.prefer_huge(slab.memory)
        try:
            context_length = min(config.context_length, num_blocks * host.block_size)
            if context_length < 2:
                raise CheckpointError(f"{spec.name} has room for {context_length} token; raise kv_tokens or kv_gib")
            model = family.load(config, WeightLoader(reader, dtype, arena.device), context_length)
            reader.finish()
            runner = ModelRunner(model, _as_cache(slab, config, host.block_size, num_blocks, dtype))
            # Not token 0: that is often a padding token whose embedding is zero, which would prove nothing.
            runner.warm_up([i % config.vocab_size for i in range(1, 1 + min(_WARM_UP_TOKENS, context_length - 1))])
        except BaseException:
            arena.give_back(slab)
            raise
    except StepError as error:
        raise CheckpointError(str(error)) from error
    except ArenaFullError as error:
        raise CheckpointError(
            f"the KV arena is too fragmented for {spec.name}: {error}; unload a model first"
        ) from error
    finally:
        reader.close()
    info = ModelInfo(
        name=spec.name,
        context_length=context_length,
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(directory, raw_config),
        dtype=str(dtype).removeprefix("torch."),
        block_size=host.block_size,
        total_blocks=num_blocks,
        weights_bytes=reader.num_parameters * dtype.itemsize,
        load_s=time.perf_counter() - started,
    )
    limits = Limits(host.block_size, host.max_num_batched_tokens, host.max_num_seqs, host.max_waiting)
    return LoadedModel(spec, Engine(info, runner, limits), slab)


def _choose_dtype(spec: ModelSpec, reader: CheckpointReader, device: torch.device) -> torch.dtype:
    if spec.dtype != "auto":
        return _DTYPES[spec.dtype]
    if device.type == "cpu" and reader.num_parameters < SMALL_MODEL_PARAMETERS:
        return torch.float32
    # Of the two 16-bit types only bf16 has fp32's range, which activations of large models need.
    return torch.float32 if reader.dtypes == {"F32"} else torch.bfloat16


def _choose_num_blocks(
    spec: ModelSpec,
    host: HostConfig,
    shape: CacheShape,
    context_length: int,
    dtype: torch.dtype,
    arena: Arena,
    num_sharing: int,
) -> int:
    block_bytes = _block_bytes(shape, host.block_size, dtype)
    largest = arena.largest_gap_bytes // block_bytes
    if spec.kv_tokens is not None:
        num_blocks = -(-spec.kv_tokens // host.block_size)
        if not 0 < num_blocks <= largest:
            raise CheckpointError(
                f"{spec.name} asks for {spec.kv_tokens} tokens of KV cache, {num_blocks * block_bytes} bytes; "
                f"the arena can give {arena.largest_gap_bytes}: lower kv_tokens or raise kv_gib"
            )
        return num_blocks
    useful = host.max_num_seqs * -(-context_length // host.block_size)  # every sequence at its full length
    num_blocks = min(useful, largest, arena.free_bytes // num_sharing // block_bytes)
    if num_blocks == 0:
        raise CheckpointError(
            f"the KV arena has {arena.free_bytes} bytes left for {num_sharing} models, "
            f"and one block of {spec.name} takes {block_bytes}: "
            "give the host more KV memory (kv_gib) or each model its own share (kv_tokens)"
        )
    return num_blocks


def _block_bytes(shape: CacheShape, block_size: int, dtype: torch.dtype) -> int:
    return shape.num_layers * 2 * block_size * shape.num_kv_heads * shape.head_dim * dtype.itemsize


def _as_cache(slab: Slab, shape: CacheShape, block_size: int, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
    assert slab.start % ALIGNMENT == 0
    return slab.memory.view(dtype).view(num_blocks, shape.num_layers, 2, block_size, shape.num_kv_heads, shape.head_dim)

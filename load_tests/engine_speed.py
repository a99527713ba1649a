"""Speed of the engine's decode and prefill steps, compared with the device's limits.

The weights of a model shape are random and made on the device. The ceilings are measured first in the same run: bytes moved per second (decode's
floor is reading every weight once) and matrix products per second (prefill's floor). Nothing is loaded from disk; only torch and the engine are
imported, so that it runs on a bare GPU machine.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from typing import Any

import torch

from load_tests.ceilings import NAMES, Ceilings
from load_tests.timing import Budget, host_times_s
from pilotlight.engine.api.protocol import ModelInfo, SamplingParams, Submit
from pilotlight.engine.core.chunk_steps import scratch_step, step_of
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.stats import StepTimes
from pilotlight.engine.core.step import StepInput, greedy_rows
from pilotlight.engine.description.decoder_config import LayerKind
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.description.rotary_scaling import RotaryRule
from pilotlight.engine.description.shapes import NormKind
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.dense import load
from pilotlight.engine.scheduling.plan import Chunk, SchedulerLimits
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.storage import WeightStorage
from pilotlight.kernels.cpu import library, pages

BLOCK_SIZE = 16
# Numbers of untimed and timed steps. A decode step is recorded as a CUDA graph at its fourth launch, so that must be an untimed one.
WARM_UPS, REPEATS, LEAST_REPEATS = (
    6,
    10,
    3,
)
DECODE_CONTEXT = 512  # tokens cached per sequence while decode is timed
SERVED_STEPS = 24  # timed steps of an engine; half as many untimed ones run first, to record graphs


def llama_shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> DenseConfig:
    return DenseConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=intermediate, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=hidden // heads, context_length=65536, norm=NormKind(1e-5), rotary=(RotaryRule("default", 500_000.0),),
        tied=False, layers=(LayerKind(),) * layers, attention_scale=(hidden // heads) ** -0.5,
    )  # fmt: skip


SHAPES = {
    "8b": llama_shape(4096, 14336, 32, 32, 8, 128256),  # the shape of Llama 3.1 8B
    "3b": llama_shape(3072, 8192, 28, 24, 8, 32000),
    "0.5b": llama_shape(1024, 4096, 28, 16, 8, 32000),
    "tiny": llama_shape(256, 704, 4, 4, 2, 2048),
}


class RandomWeights(WeightStorage):
    """A weight storage that fills each tensor with small random numbers in place."""

    def __init__(self, device: torch.device) -> None:
        super().__init__({})
        self._device = device

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        into = (
            pages.empty(shape, dtype)
            if self._device.type == "cpu"
            else torch.empty(shape, dtype=dtype, device=self._device)
        )
        return into.normal_(0.0, 0.02) if into.dim() > 1 else into.fill_(1.0)

    def compute(self, task: Callable[[], None]) -> None:
        task()

    def __contains__(self, name: str) -> bool:
        return name.startswith("model.")  # so the loader takes this prefix for all names


def make_runner(config: DenseConfig, device: torch.device, dtype: torch.dtype, kv_tokens: int) -> ModelRunner:
    return ModelRunner(*make_model(config, device, dtype, kv_tokens))


@torch.inference_mode()
def make_model(
    config: DenseConfig, device: torch.device, dtype: torch.dtype, kv_tokens: int
) -> tuple[Decoder, CacheLayout, torch.Tensor]:
    """Return a model with random weights, its cache's blocks and their layout."""
    loader = WeightLoader(RandomWeights(device), dtype, device)
    model = load(config, loader, config.context_length)
    layout = CacheLayout(config.cached_layers, BLOCK_SIZE, dtype, config.context_length)
    kv_cache = layout.new_blocks(-(-kv_tokens // BLOCK_SIZE), device)
    pages.prefer_huge(kv_cache)
    return model, layout, kv_cache


def weight_bytes(config: DenseConfig, dtype: torch.dtype) -> int:
    """Return the bytes that every decode step reads, whatever the batch.

    The embedding is looked up, not read.
    """
    attention = config.hidden_size * config.head_dim * 2 * (config.num_heads + config.num_kv_heads)
    mlp = 3 * config.hidden_size * config.intermediate_size
    return (config.num_layers * (attention + mlp) + config.vocab_size * config.hidden_size) * dtype.itemsize


def kv_bytes_per_token(config: DenseConfig, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def prefill_flops(config: DenseConfig, tokens: int) -> float:
    """Return the operations of a prompt's matrix products.

    These are 2 per weight and token, 2 per head element and pair of tokens (half of 4, as attention is causal), and one row of logits.
    """
    per_token = weight_bytes(config, torch.uint8) - config.vocab_size * config.hidden_size
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * tokens * tokens
    return 2.0 * per_token * tokens + attention + 2.0 * config.vocab_size * config.hidden_size


def steps_of(batches: SequenceOf[int], prompts: SequenceOf[int], vocab_size: int) -> dict[str, tuple[int, StepInput]]:
    """Return steps by name: decodes of batches after DECODE_CONTEXT tokens each, and prompts.

    Each step comes with the number of tokens that it computes.
    """
    blocks = -(-(DECODE_CONTEXT + 1) // BLOCK_SIZE)
    steps = {}
    for batch in batches:
        tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)]
        steps[f"decode {batch}"] = (batch, decode_step(tables, DECODE_CONTEXT + 1))
    for length in prompts:
        tokens = [i % vocab_size for i in range(length)]
        steps[f"prompt {length}"] = (length, scratch_step(tokens, 0, BLOCK_SIZE)[0])
    return steps


def decode_step(tables: list[list[int]], num_tokens: int) -> StepInput:
    """Return a step in which sequences of `num_tokens` tokens, in these blocks, compute their newest one."""
    chunks = []
    for table in tables:
        sequence = Sequence("", [7] * num_tokens, SamplingParams(1), b"", num_computed_tokens=num_tokens - 1)
        sequence.tables = [BlockTable(table)]
        chunks.append(Chunk.next_of(sequence, 1))
    return step_of(chunks, BLOCK_SIZE)


def compute(runner: ModelRunner, step: StepInput) -> None:
    runner.choose(runner.forward(step), greedy_rows(step)).collect()


def step_s(runner: ModelRunner, step: StepInput, share_s: float) -> tuple[float, int]:
    """Return the median wall time of a step, and how many were timed.

    LEAST_REPEATS to REPEATS steps are timed, as many as fit into `share_s`.
    """
    device = runner.kv_cache.device

    def work() -> None:
        compute(runner, step)

    warm = host_times_s(device, work, repeats=WARM_UPS, warm_ups=0)
    repeats = max(LEAST_REPEATS, min(REPEATS, int((share_s - sum(warm)) / warm[-1])))
    return statistics.median(host_times_s(device, work, repeats, warm_ups=0)), repeats


def decode_speed(
    runner: ModelRunner, config: DenseConfig, batch: int, bandwidth_gb_per_s: float, share_s: float = 60.0
) -> dict[str, Any]:
    dtype = runner.layout.dtype
    blocks = -(-(DECODE_CONTEXT + 1) // BLOCK_SIZE)
    step = decode_step([list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)], DECODE_CONTEXT + 1)
    taken_s, repeats = step_s(runner, step, share_s / 2)
    moved = weight_bytes(config, dtype) + batch * DECODE_CONTEXT * kv_bytes_per_token(config, dtype)
    result: dict[str, Any] = {
        "batch": batch,
        "step_ms": taken_s * 1e3,
        "repeats": repeats,
        "tokens_per_s": batch / taken_s,
        "share_of_bandwidth": moved / taken_s / 1e9 / bandwidth_gb_per_s,
    }
    busy_s = None
    if runner.kv_cache.is_cuda:
        result["profiled"], busy_s = launches(lambda: compute(runner, step))
    result["served"] = served(runner, config, batch, busy_s)
    if runner.graphs is None:
        return result
    graphs, runner.graphs = runner.graphs, None
    result["step_ms_without_graphs"] = step_s(runner, step, share_s / 2)[0] * 1e3
    if runner.kv_cache.is_cuda:
        result["profiled_without_graphs"], busy_s = launches(lambda: compute(runner, step))
    result["served_without_graphs"] = served(runner, config, batch, busy_s)
    runner.graphs = graphs
    return result


def served(runner: ModelRunner, config: DenseConfig, batch: int, busy_s: float | None) -> dict[str, Any]:
    """Decode through an engine, with overlapping steps if the runner supports them.

    Returns a step's time, the host's part of it, and the share in which the device is idle. `busy_s` is the time that one step's kernels take.
    """
    info = ModelInfo(
        "bench", config.context_length, config.vocab_size, (), "", BLOCK_SIZE, len(runner.kv_cache), 0, 0.0
    )
    engine = Engine(info, runner, SchedulerLimits(BLOCK_SIZE, 8192, batch, batch, 3600.0))
    for i in range(batch):
        prompt = tuple((7 * i + j) % config.vocab_size for j in range(DECODE_CONTEXT))
        engine.submit(Submit(f"{i}", "bench", prompt, SamplingParams(10_000, temperature=0.0, ignore_eos=True)))
    heard = [0] * batch
    while min(heard) < SERVED_STEPS // 2:
        engine.step()
        _hear(engine, heard)
    times, hosts = [], []
    for _ in range(SERVED_STEPS):
        began = time.perf_counter()
        engine.step()
        _hear(engine, heard)
        times.append(time.perf_counter() - began)
        hosts.append(engine.stats.last_step)
    engine.sequences.abort_all()
    engine.close()
    taken_s = statistics.median(times)
    parts = {part: 1e3 * statistics.median(getattr(host, part) for host in hosts) for part in StepTimes._fields}
    result: dict[str, Any] = {"step_ms": taken_s * 1e3, "tokens_per_s": batch / taken_s, "host": parts}
    if busy_s:
        result["idle_share"] = max(0.0, 1 - busy_s / taken_s)
    return result


def _hear(engine: Engine, heard: list[int]) -> None:
    for output in engine.sequences.take_outputs():
        assert output.finish_reason is None, output
        heard[int(output.sequence_id)] += len(output.token_ids)


def prefill_speed(
    runner: ModelRunner, config: DenseConfig, tokens: int, matmul_tflop_per_s: float, share_s: float = 60.0
) -> dict[str, Any]:
    step, _ = scratch_step([i % config.vocab_size for i in range(tokens)], 0, BLOCK_SIZE)
    taken_s, repeats = step_s(runner, step, share_s)
    return {
        "tokens": tokens,
        "step_ms": taken_s * 1e3,
        "repeats": repeats,
        "tokens_per_s": tokens / taken_s,
        "mfu": prefill_flops(config, tokens) / taken_s / 1e12 / matmul_tflop_per_s,
    }


def launches(work: Callable[[], object]) -> tuple[dict[str, Any], float | None]:
    """Count the kernels of one step and the seconds that they keep the device busy.

    If the driver's profiling is unavailable, the result contains only the reason.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        wall_s = time.perf_counter() - started
    kernels = [event for event in trace.events() if event.device_type.name == "CUDA"]
    if not kernels:
        return {"absent": "the profiler saw no kernel: CUPTI is missing or not permitted"}, None
    busy_s = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
    return {"kernels": len(kernels), "busy_ms": busy_s * 1e3, "profiled_ms": wall_s * 1e3}, busy_s


def measure(
    shape: str, device: torch.device, dtype: torch.dtype, batches: list[int], prompts: list[int], budget_s: float
) -> Iterator[dict[str, Any]]:
    """Measure everything for one shape; yield the results again after each new row.

    Memory-bound work is compared with the larger of the two measured bandwidths.
    """
    config = SHAPES[shape]
    if device.type == "cpu":
        library.start(wait=True)
    budget = Budget(budget_s, len(batches) + len(prompts))
    limits = Ceilings(device, (dtype,)).measure().summary()
    bandwidth, matmul = max(limits["copy_gb_per_s"], limits["read_gb_per_s"]), limits[f"{NAMES[dtype]}_tflop_per_s"]
    each = DECODE_CONTEXT + 3 * SERVED_STEPS + 2 * BLOCK_SIZE
    kv_tokens = max(max(batches) * each, *prompts) + BLOCK_SIZE
    runner = make_runner(config, device, dtype, kv_tokens)
    results: dict[str, Any] = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "weight_gb": weight_bytes(config, dtype) / 1e9,
        "ceilings": limits,
        "decode": [],
        "prefill": [],
    }
    for batch in batches:
        results["decode"].append(decode_speed(runner, config, batch, bandwidth, budget.next_share_s()))
        yield results
    for tokens in prompts:
        results["prefill"].append(prefill_speed(runner, config, tokens, matmul, budget.next_share_s()))
        yield results

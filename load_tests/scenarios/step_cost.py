"""The cost of a step without the model's computation. `make bench-step` runs it.

python -m load_tests.scenarios.step_cost

An engine runs in this process with random weights: 64 sequences decode, and uncached prompts are prefilled. It measures the phases of the host, and
the prefix cache's and the generation check's shares of a step. Shares refer to the measured shape and are smaller for larger models. Targets:
schedule, prepare and publish together within 1 ms; prefix cache without a hit, and generation tags, below 1 % each. With the embedded model, a
recorded forward pass that verifies three drafts of one sequence may take at most 1.15 times one that decodes.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import pilotlight.engine
from load_tests import kv_cost
from load_tests.engine_speed import BLOCK_SIZE, SHAPES, make_runner
from load_tests.records import spread, write_record
from pilotlight.engine.api.protocol import HostConfig, ModelInfo, ModelSpec, SamplingParams, Submit
from pilotlight.engine.core.chunk_steps import scratch_step, step_of
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv import manager
from pilotlight.engine.kv.pool.block_pool import BlockPool
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.kv.pool.cached_prefix import PrefixLookup
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.scheduling.plan import Chunk, SchedulerLimits
from pilotlight.kernels.cpu import library

BATCH = 64
EMBER = Path(pilotlight.engine.__file__).parent / "embedded" / "ember"
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=int, default=5, help="number of each kind, in turns")
    options = parser.parse_args()
    console = Console()
    with console.status("preparing the model"):
        library.start(wait=True)
        bench = Bench(options.shape)
    results = bench.run(options.rounds, console)
    show(console, results)
    console.print(f"Record: {write_record('step-cost', results)}", soft_wrap=True)


class Bench:
    def __init__(self, shape: str) -> None:
        self.shape = shape
        self.config = SHAPES[shape]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float32 if shape == "tiny" and self.device.type == "cpu" else torch.bfloat16
        kv_tokens = BATCH * (64 + OUTPUT_TOKENS + BLOCK_SIZE) + kv_cost.BLOCKS * BLOCK_SIZE
        self.runner = make_runner(self.config, self.device, self.dtype, kv_tokens)
        self._random = random.Random(1)
        self._num_submitted = 0

    def run(self, rounds: int, console: Console) -> dict[str, Any]:
        phases: dict[str, list[float]] = {"schedule": [], "prepare": [], "publish": [], "all three": [], "step": []}
        shares: list[float] = []
        for index in range(rounds):
            with console.status(f"round {index + 1} of {rounds}"):
                for name, values in self.decode().items():
                    phases[name] += values
                shares.append(self.prefix_cache_share())
        return {
            "shape": self.shape,
            "dtype": str(self.dtype).removeprefix("torch."),
            "batch": BATCH,
            "phases_ms": {name: spread(values) for name, values in phases.items()},
            "prefix_cache": {"prompt_tokens": PROMPT_TOKENS, "hits": 0, "share_of_steps": spread(shares, 6)},
            "generation_tags": kv_cost.measure(self.runner),
            "verify": verify_cost(),
            "targets": {"all three": 1.0, "prefix_cache": 0.01, "generation_tags": 0.01, "verify": 1.15},
        }

    def decode(self) -> dict[str, list[float]]:
        """Return milliseconds of each phase, for each step in which a full batch gets one token per sequence."""
        made = self._engine()
        for _ in range(BATCH):
            made.submit(self._submit(32, OUTPUT_TOKENS))
        taken: dict[str, list[float]] = {"schedule": [], "prepare": [], "publish": [], "all three": [], "step": []}
        while made.has_work:
            is_full = len(made.scheduler.running) == BATCH and not made.scheduler.waiting
            began = time.perf_counter()
            made.step()
            step_s = time.perf_counter() - began
            is_decode = len(made.sequences.take_outputs()) == BATCH
            made.on_idle()
            if is_full and is_decode:
                times = made.stats.last_step
                host = times.schedule_s, times.prepare_s, times.publish_s
                for name, seconds in zip(taken, (*host, sum(host), step_s), strict=True):
                    taken[name].append(1e3 * seconds)
        return {name: values[4:] for name, values in taken.items()}  # the first four steps only warm up

    def prefix_cache_share(self) -> float:
        """Return the prefix cache's share of the time to answer prompts without a cached block.

        The cache hashes, looks up and inserts blocks.
        """
        made = self._engine()
        with timed_prefix_cache() as cache:
            began = time.perf_counter()
            for _ in range(4):
                made.submit(self._submit(PROMPT_TOKENS, OUTPUT_TOKENS))
            while made.has_work:
                made.step()
                made.sequences.take_outputs()
                made.on_idle()
            whole = time.perf_counter() - began
        assert made.load().prefix_hits == 0, "the prompts must not be cached"
        return cache.seconds / whole

    def _engine(self) -> Engine:
        blocks = len(self.runner.kv_cache)
        info = ModelInfo(
            "m", self.config.context_length, self.config.vocab_size, (), "bf16", BLOCK_SIZE, blocks, 1, 0.0
        )
        return Engine(info, self.runner, SchedulerLimits(BLOCK_SIZE, 2048, BATCH, BATCH))

    def _submit(self, prompt_tokens: int, output_tokens: int) -> Submit:
        self._num_submitted += 1
        prompt = tuple(self._random.randrange(self.config.vocab_size) for _ in range(prompt_tokens))
        return Submit(str(self._num_submitted), "m", prompt, SamplingParams(max_tokens=output_tokens, temperature=0.0))


@torch.inference_mode()
def verify_cost(context: int = 64, drafts: int = 3, rounds: int = 200) -> dict[str, Any]:
    """Return the time of a forward pass that verifies drafts and of one that decodes, in turns.

    Both have one sequence of the embedded model.
    """
    threads = torch.get_num_threads()
    config = HostConfig(kv_bytes=16 << 20, threads=threads)
    loaded = load_model(ModelSpec("ember", str(EMBER), "auto", 2048), config, make_kv_memory(config))
    runner, token_ids = loaded.engine.runner, list(range(5, 6 + context + drafts))
    assert isinstance(runner, ModelRunner)
    block_size, num_groups = runner.layout.block_size, len(runner.layout.groups)
    runner.forward(scratch_step(token_ids[:context], 0, block_size, num_groups)[0])
    sequence = Sequence("", token_ids[: context + 1], SamplingParams(max_tokens=9), b"", num_computed_tokens=context)
    blocks = -(-len(token_ids) // block_size)
    sequence.tables = [BlockTable(range(group, num_groups * blocks, num_groups)) for group in range(num_groups)]
    steps = [
        step_of([Chunk.next_of(sequence, 1, drafts=tuple(more))], block_size) for more in ([], token_ids[context + 1 :])
    ]
    taken: list[list[float]] = [[], []]
    for i in range(rounds):
        for step, times in zip(steps, taken, strict=True):
            began = time.perf_counter()
            runner.forward(step)
            if i >= 10:  # earlier passes record the graph
                times.append(time.perf_counter() - began)
    loaded.engine.close()
    decode_s, verify_s = taken
    ratios = [long / short for short, long in zip(decode_s, verify_s, strict=True)]
    return {
        "rows": 1 + drafts,
        "context": context,
        "decode_ms": spread([1e3 * s for s in decode_s]),
        "ratio": spread(ratios),
    }


class Stopwatch:
    seconds = 0.0

    def timing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


@contextmanager
def timed_prefix_cache() -> Iterator[Stopwatch]:
    """Time all calls that only the prefix cache needs, including the cost of timing."""
    watch = Stopwatch()
    places = [(PrefixLookup, "find_cached"), (manager, "extend_chain"), (BlockPool, "register")]
    before = [getattr(owner, name) for owner, name in places]
    for (owner, name), function in zip(places, before, strict=True):
        setattr(owner, name, watch.timing(function))
    try:
        yield watch
    finally:
        for (owner, name), function in zip(places, before, strict=True):
            setattr(owner, name, function)


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table("measure", "median", "min", "max", "n", "target", box=None, header_style="bold")
    for name, value in results["phases_ms"].items():
        target = results["targets"].get(name, "")
        row = [str(value[key]) for key in ("median", "min", "max", "n")]
        table.add_row(f"{name}, ms" if name == "step" else f"host: {name}, ms", *row, str(target))
    share = results["prefix_cache"]["share_of_steps"]
    table.add_row(
        "prefix cache, no hit", *(f"{share[key]:.3%}" for key in ("median", "min", "max")), str(share["n"]), "1 %"
    )
    tags = results["generation_tags"]
    table.add_row(f"generation tags, {tags['check_ms']:.3f} ms", f"{tags['share_of_step']:.3%}", "", "", "", "1 %")
    verify = results["verify"]["ratio"]
    row = [str(verify[key]) for key in ("median", "min", "max", "n")]
    table.add_row("4 rows of one sequence, times 1", *row, str(results["targets"]["verify"]))
    console.print(table)


if __name__ == "__main__":
    main()

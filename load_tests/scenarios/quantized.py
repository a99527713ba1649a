"""A model on this CPU with weights in bf16 and with the same shapes in codes of eight and four bits, step by step in turns; of the 0.5b
beside llama.cpp's q8_0 and q4_K_M, of which it reads the former's file, too (make peers).

    python -m load_tests.scenarios.quantized                       0.5b, some five minutes
    python -m load_tests.scenarios.quantized --shape 8b --rounds 3

Decode steps of each batch and prompts are timed by turns; the figure is the median of the rounds' ratios to bf16. Numbers are random, which no step
can tell; embedding and head stay in bf16, as `pilotlight quantize` leaves them. llama.cpp times itself, as long as a look at ours takes.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from load_tests.ceilings import Ceilings
from load_tests.engine_speed import BLOCK_SIZE, DECODE_CONTEXT, SHAPES, RandomWeights, compute, steps_of
from load_tests.peers.llama_cpp import LlamaFiles, Look
from load_tests.records import spread, write_record
from load_tests.scenarios.engines import ROOT
from pilotlight.engine.description.dense_config import DenseConfig
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.dense import load
from pilotlight.engine.weights.checkpoint import Checkpoint
from pilotlight.engine.weights.config import read_config
from pilotlight.engine.weights.filling import fill
from pilotlight.engine.weights.formats.weight_formats import read_format
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.shard import Split
from pilotlight.engine.weights.storage import CheckpointStorage
from pilotlight.kernels.cpu import library, pages
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.int8 import Int8Weight
from pilotlight.kernels.matrices.weight import Weight

SUBJECT = "quantized"
_CPU = torch.device("cpu")
_WARM_UPS = 6  # a step is recorded when it is launched for the fourth time
_BATCHES, _PROMPTS = (1, 4, 16), (512,)
_LEAST_S = 0.15  # of steps between two looks at the clock
_FORMS = {"int8 by row": (8, 0), "int8 by 32": (8, 32), "int4 by 32": (4, 32), "int4 by 128": (4, 128)}


class _CodedLoader(WeightLoader):
    """Projections of random codes, under scales of bf16."""

    def __init__(self, storage: RandomWeights, bits: int, group: int) -> None:
        super().__init__(storage, torch.bfloat16, _CPU)
        self.num_bytes = 0
        self._bits, self._group = bits, group

    def matrix(
        self, names: Sequence[str], rows: Sequence[int], columns: int, *, experts: int = 1, split: Split | None = None, unit: int = 1,
        repeats: bool = False,
    ) -> Weight:  # fmt: skip
        if not names[0].endswith("_proj"):
            return super().matrix(names, rows, columns, experts=experts, split=split, unit=unit, repeats=repeats)
        count, group = sum(rows), self._group or columns
        scales = torch.full((count, columns // group), 0.02 / (1 << self._bits), dtype=torch.bfloat16)
        if self._bits == 8:
            weight: Weight = Int8Weight(
                torch.randint(-127, 128, (count, columns)).to(torch.int8), scales, columns, group
            )
        else:
            codes = torch.randint(0, 256, (count, columns // 2), dtype=torch.uint8)
            weight = Int4Weight(codes, scales, None, columns, group)
        self.num_bytes += weight.num_bytes
        return weight


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="where make peers has put llama.cpp")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library.start(wait=True)
    if library.loaded is None:
        print("The C library cannot be built here.", file=sys.stderr)
        return 3
    results: dict[str, Any] = {"shape": options.shape, "threads": options.threads}
    results["ceilings"] = Ceilings(_CPU, (torch.bfloat16,)).measure().summary()
    peers = LlamaFiles.find(options.peers, options.shape, options.threads, ("q8_0", "q4_K_M"))
    results |= _speeds(options.shape, options.rounds, peers)
    _show(results)
    print(f"Record: {write_record(SUBJECT, results)}")
    return 0


def _read_here(file: Path, folder: Path, config: DenseConfig) -> Decoder:
    """Load a GGUF file's model, its codes as they are."""
    directory = directory_of(file, folder)
    storage = CheckpointStorage(Checkpoint.open(directory), lambda name, shape, dtype: pages.empty(shape, dtype))
    loader = WeightLoader(storage, torch.bfloat16, _CPU, read_format(read_config(directory)), keeps_packed=True)
    model = load(config, loader, config.context_length)
    fill(storage.jobs, storage.tasks)
    return model


def _speeds(shape: str, rounds: int, peers: LlamaFiles | None) -> dict[str, Any]:
    config = SHAPES[shape]
    models = {"bf16": load(config, WeightLoader(RandomWeights(_CPU), torch.bfloat16, _CPU), config.context_length)}
    projections = {}
    for name, (bits, group) in _FORMS.items():
        loader = _CodedLoader(RandomWeights(_CPU), bits, group)
        models[name] = load(config, loader, config.context_length)
        projections[name] = loader.num_bytes
    if peers is not None:
        with TemporaryDirectory() as folder:
            models["q8_0 file"] = _read_here(peers.files["q8_0"], Path(folder), config)
    layout = CacheLayout(config.cached_layers, BLOCK_SIZE, torch.bfloat16, config.context_length)
    kv_tokens = max(max(_BATCHES) * (DECODE_CONTEXT + 2 * BLOCK_SIZE), *_PROMPTS) + BLOCK_SIZE
    cache = layout.new_blocks(-(-kv_tokens // BLOCK_SIZE), _CPU)
    runners = {name: ModelRunner(model, layout, cache) for name, model in models.items()}
    steps = steps_of(_BATCHES, _PROMPTS, config.vocab_size)
    rows = {}
    for name, (tokens, step) in steps.items():
        looks = {form: _look(partial(compute, runner, step)) for form, runner in runners.items()}
        if peers is not None and name == "decode 1":
            looks |= peers.looks()
        rows[name] = _compared(looks, tokens, rounds)
    return {"projection_bytes": projections, "steps": rows}


def _look(work: Callable[[], object]) -> Look:
    """Return what times a step, again and again for a while."""
    for _ in range(_WARM_UPS):
        work()
    began = time.perf_counter()
    work()
    times = max(1, int(_LEAST_S / (time.perf_counter() - began)))

    def look() -> float:
        began = time.perf_counter()
        for _ in range(times):
            work()
        return (time.perf_counter() - began) / times

    return look


def _compared(looks: dict[str, Look], tokens: int, rounds: int) -> dict[str, Any]:
    taken: dict[str, list[float]] = {name: [] for name in looks}
    for i in range(rounds):
        for name in list(taken)[:: 1 if i % 2 else -1]:
            try:
                taken[name].append(looks[name]())
            except RuntimeError as error:  # llama.cpp ended without a word: the others are measured none the less
                print(f"{name} is left out: {error}", file=sys.stderr)
                del taken[name]
    return {
        name: {
            "tokens_per_s": spread([tokens / one for one in of]),
            "times_as_fast": spread([plain / one for plain, one in zip(taken["bf16"], of, strict=True)]),
        }
        for name, of in taken.items()
    }


def _show(results: dict[str, Any]) -> None:
    print(f"{results['shape']}, {results['threads']} threads, reading {results['ceilings']['read_gb_per_s']:.1f} GB/s")
    for name, row in results["steps"].items():
        said = [
            f"{form} {of['tokens_per_s']['median']:,.1f} ({of['times_as_fast']['median']:.2f}x)"
            for form, of in row.items()
        ]
        print(f"  {name:<11} tokens/s: {', '.join(said)}")


if __name__ == "__main__":
    sys.exit(main())

"""Speed of steps and sizes of a bf16 model on this CPU, with plain weights and with 12-bit ones.

    python -m load_tests.scenarios.lossless                       0.5b, two minutes
    python -m load_tests.scenarios.lossless --shape 3b --rounds 5

Decode steps of each batch size, and prompts, are timed in pairs, alternately plain and 12-bit weights first; the figure is the median of the pairs'
ratios. llama.cpp decodes one sequence of the 0.5b with bf16 and q8_0 for comparison, if `make peers` has installed it. Both models have the same
random weights, distributed as in a trained model's matrices. Of trained checkpoints only the sizes are measured (`--sizes`).
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from load_tests.ceilings import Ceilings
from load_tests.engine_speed import BLOCK_SIZE, DECODE_CONTEXT, SHAPES, RandomWeights, compute, steps_of
from load_tests.peers.llama_cpp import LlamaFiles, Look
from load_tests.records import spread, write_record
from load_tests.scenarios.engines import ROOT
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.dense import load
from pilotlight.engine.weights.bundles.bundle import BundleIdentity, CheckpointFacts, lay_out
from pilotlight.engine.weights.bundles.lossless import CodedTensors, Matrix
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.storage import BundleMemory, BundleStorage
from pilotlight.engine.weights.tensor_bytes import as_bytes
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS
from pilotlight.kernels.cpu import library, pages
from pilotlight.kernels.matrices.lossless import Survey

SUBJECT = "lossless"
_CPU = torch.device("cpu")
_WARM_UPS = 6  # untimed steps; a step is recorded as a graph at its fourth launch
_BATCHES, _PROMPTS = (1, 4, 16, 64), (512,)
_LEAST_S = 0.15  # steps between two clock readings take at least this time


class _KeptWeights(RandomWeights):
    """Random weights, kept by name for the second model."""

    def __init__(self) -> None:
        super().__init__(_CPU)
        self.tensors: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        into = self.tensors[name] = super().take(name, shape, dtype)
        return into


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--sizes", type=Path, nargs="*", default=[], help="checkpoints in bf16 whose sizes are measured"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library.start(wait=True)
    if library.loaded is None:
        print("The C library cannot be built here.", file=sys.stderr)
        return 3
    results: dict[str, Any] = {"shape": options.shape, "threads": options.threads, "checkpoints": {}}
    for directory in options.sizes:
        results["checkpoints"][directory.name] = _sizes(_stored(directory))
    results["ceilings"] = Ceilings(_CPU, (torch.bfloat16,)).measure().summary()
    peers = LlamaFiles.find(options.peers, options.shape, options.threads, ("bf16", "q8_0"))
    results |= _speeds(options.shape, options.rounds, peers)
    _show(results)
    subject = SUBJECT if options.shape == "0.5b" else f"{SUBJECT}-{options.shape}"
    print(f"Record: {write_record(subject, results)}")
    return 0


def _speeds(shape: str, rounds: int, peers: LlamaFiles | None) -> dict[str, Any]:
    config, weights = SHAPES[shape], _KeptWeights()
    loader = WeightLoader(weights, torch.bfloat16, _CPU)
    plain = load(config, loader, config.context_length)
    began = time.perf_counter()
    coded, num_bytes = _coded(config, weights.tensors, loader.matrices)
    coding_s = time.perf_counter() - began
    layout = CacheLayout(config.cached_layers, BLOCK_SIZE, torch.bfloat16, config.context_length)
    kv_tokens = max(max(_BATCHES) * (DECODE_CONTEXT + 2 * BLOCK_SIZE), *_PROMPTS) + BLOCK_SIZE
    cache = layout.new_blocks(-(-kv_tokens // BLOCK_SIZE), _CPU)
    runners = [ModelRunner(model, layout, cache) for model in (plain, coded)]
    plain_bytes = sum(tensor.nbytes for tensor in weights.tensors.values())
    steps = steps_of(_BATCHES, _PROMPTS, config.vocab_size)
    rows = {}
    for name, (tokens, step) in steps.items():
        works = [partial(compute, runner, step) for runner in runners]
        others = peers.looks() if peers is not None and name == "decode 1" else {}
        rows[name] = _compared(works, tokens, rounds, others)
    return {
        "plain_bytes": plain_bytes,
        "coded_bytes": num_bytes,
        "coding_s": coding_s,
        "matrices": _sizes(weights.tensors),
        "steps": rows,
    }


def _compared(
    works: Sequence[Callable[[], None]], tokens: int, rounds: int, others: Mapping[str, Look]
) -> dict[str, Any]:
    for work in works:
        for _ in range(_WARM_UPS):
            work()
    began = time.perf_counter()
    works[0]()
    times = max(1, int(_LEAST_S / (time.perf_counter() - began)))
    taken: list[list[float]] = [[], []]
    by_others: dict[str, list[float]] = {name: [] for name in others}
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            began = time.perf_counter()
            for _ in range(times):
                works[which]()
            taken[which].append((time.perf_counter() - began) / times)
        for name, look in others.items():
            by_others[name].append(look())
    ratios = [plain / coded for plain, coded in zip(*taken, strict=True)]
    return {
        "plain_tokens_per_s": spread([tokens / one for one in taken[0]]),
        "coded_tokens_per_s": spread([tokens / one for one in taken[1]]),
        "times_as_fast": spread(ratios),
        "others_tokens_per_s": {name: spread([tokens / one for one in of]) for name, of in by_others.items()},
    }


def _coded(config: Any, tensors: Mapping[str, torch.Tensor], matrices: Mapping[str, Matrix]) -> tuple[Any, int]:
    """Return the same model with its matrices in 12 bits, and its bytes."""
    coded = CodedTensors(tensors, matrices, USUAL_LIMITS.coded_share)
    list(coded.survey())
    bundle = lay_out(BundleIdentity("", "", "", ""), CheckpointFacts(0, ()), coded.specs)
    memory = pages.empty((bundle.size,), torch.uint8)
    content = as_bytes(memory)
    for placed in bundle.tensors:
        at = placed.start
        for piece in coded.pieces(placed.spec.name):
            content[at : at + piece.nbytes] = as_bytes(piece)
            at += piece.nbytes
    storage = BundleStorage(bundle, BundleMemory(memory, bundle).take)
    loader = WeightLoader(storage, torch.bfloat16, _CPU, reads_codes=True)
    return load(config, loader, config.context_length), bundle.data_bytes


def _stored(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def _sizes(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return the bytes of all bf16 matrices, plain and in 12 bits, and the share of escapes."""
    plain = coded = escapes = 0
    for tensor in tensors.values():
        if tensor.dim() == 2:
            matrix = tensor.to(torch.bfloat16)
            survey = Survey.of(matrix)
            plain += matrix.nbytes
            coded += min(survey.num_bytes, matrix.nbytes)
            escapes += survey.num_escapes
    return {
        "plain_bytes": plain,
        "coded_bytes": coded,
        "saved": 1 - coded / plain,
        "escapes_per_million": 2e6 * escapes / plain,
    }


def _show(results: dict[str, Any]) -> None:
    print(f"{results['shape']}, {results['threads']} threads, reading {results['ceilings']['read_gb_per_s']:.1f} GB/s")
    for name, sizes in {"matrices": results["matrices"], **results["checkpoints"]}.items():
        print(
            f"  {name}: {sizes['plain_bytes'] / 2**20:,.1f} -> {sizes['coded_bytes'] / 2**20:,.1f} MiB, {sizes['saved']:.1%} saved, "
            f"{sizes['escapes_per_million']:.0f} escapes in a million"
        )
    for name, row in results["steps"].items():
        plain, coded, ratio = (
            row[key]["median"] for key in ("plain_tokens_per_s", "coded_tokens_per_s", "times_as_fast")
        )
        print(f"  {name:<11} plain {plain:9,.1f} tokens/s, in 12 bits {coded:9,.1f}: {ratio:.3f} times as fast")
        for other, speed in row["others_tokens_per_s"].items():
            print(f"  {name:<11} {other} {speed['median']:9,.1f} tokens/s")


if __name__ == "__main__":
    sys.exit(main())

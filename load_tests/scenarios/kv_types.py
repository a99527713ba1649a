"""A KV cache in FP8 beside one in bf16 on this CPU: `make bench-kv-types` runs it: python -m load_tests.scenarios.kv_types.

Tokens that fit in the same bytes, which are also a block's in tiers and on its way to another host; the error of the embedded model's
log-probabilities against fp32, and its evaluation; decode steps of the 0.5b shape behind long contexts, by turns, whose figure is the median of the
pairs' ratios.
"""

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch

from load_tests.engine_speed import BLOCK_SIZE, SHAPES, RandomWeights, compute, decode_step
from load_tests.records import spread, write_record
from pilotlight.engine.api.protocol import Dtype, HostConfig, KvDtype, ModelSpec, SamplingParams, Submit
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.layout import CacheLayout, in_fp8
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.models.dense import load
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.cpu import library
from training.ember.chat import HERE, Chat, render
from training.ember.evaluate import TARGETS, engine_generator, evaluate, questions

_CPU = torch.device("cpu")
_STEPS = ((1, 1024), (1, 4096), (1, 16_384), (8, 4096))  # sequences, and tokens of each
_WARM_UPS = 6  # a step is recorded when it is launched for the fourth time
_TASKS = (*TARGETS, "long", "unseen tools", "unseen keys")
_FORMS: dict[str, tuple[Dtype, KvDtype]] = {
    "fp32": ("float32", "auto"),
    "bf16": ("bfloat16", "auto"),
    "bf16, cache in FP8": ("bfloat16", "fp8"),
    "fp32, cache in FP8": ("float32", "fp8"),
}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--questions", type=int, default=30, help="of each task")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    library.start(wait=True)
    results = {
        "threads": options.threads,
        "tokens_in_1_gib": {shape: _tokens(shape) for shape in ("0.5b", "8b")},
        "log_probabilities": _errors(),
        "evaluation": _evaluations(options.questions),
        "decode": _speeds(options.rounds),
    }
    _show(results)
    print(f"Record: {write_record('kv-types', results)}")


def _layouts(shape: str) -> list[CacheLayout]:
    config = SHAPES[shape]
    cached = config.cached_layers
    both = (cached, in_fp8(cached, torch.float8_e4m3fn))
    return [CacheLayout(layers, BLOCK_SIZE, torch.bfloat16, config.context_length) for layers in both]


def _tokens(shape: str) -> dict[str, int]:
    bf16, fp8 = ((1 << 30) // layout.block_bytes * BLOCK_SIZE for layout in _layouts(shape))
    return {"bf16": bf16, "fp8": fp8}


def _errors() -> dict[str, Any]:
    """Compare the log-probabilities of the right answers to held-out questions with those that fp32 computes."""
    chat = Chat()
    asked = [one for task in _TASKS for one in questions(task, 12)]
    texts = [chat.encode(render(one.messages, one.tools)) for one in asked]
    starts = [len(chat.prompt(one.messages[:-1], one.tools)) for one in asked]
    found = {name: _log_probabilities(texts, starts, *form) for name, form in _FORMS.items()}
    exact = found["fp32"]
    return {
        "tokens": len(exact),
        "forms": {
            name: {
                "mean_log_probability": float(told.mean()),
                "mean_error": float((told - exact).abs().mean()),
                "p99_error": float((told - exact).abs().quantile(0.99)),
                "largest_error": float((told - exact).abs().max()),
            }
            for name, told in found.items()
        },
    }


def _log_probabilities(
    texts: Sequence[Sequence[int]], starts: Sequence[int], dtype: Dtype, kv_dtype: KvDtype
) -> torch.Tensor:
    """Return those of each text's tokens from `starts` on."""
    config = HostConfig(device="cpu", kv_bytes=256 << 20)
    spec = ModelSpec("ember", str(HERE), dtype, kv_dtype=kv_dtype)
    engine = load_model(spec, config, make_kv_memory(config)).engine
    told = [_told(engine, text)[start - 1 :] for text, start in zip(texts, starts, strict=True)]
    engine.close()
    return torch.tensor([logprob for one in told for logprob in one], dtype=torch.float64)


def _told(engine: Engine, prompt: Sequence[int]) -> list[float]:
    engine.submit(Submit("a", "ember", tuple(prompt), SamplingParams(max_tokens=1, prompt_logprobs=True)))
    found: list[float] = []
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            found += [reported.logprob for reported in output.prompt_logprobs or ()]
        engine.on_idle()
    return found


def _evaluations(count: int) -> dict[str, Any]:
    chat, found = Chat(), {}
    for name, (dtype, kv_dtype) in _FORMS.items():
        generate = engine_generator(HERE, chat, dtype, kv_dtype)
        scores = [evaluate(generate, chat, task, min(count, 60) if task == "long" else count) for task in _TASKS]
        found[name] = {score.task: round(score.share, 4) for score in scores}
    return found


def _speeds(rounds: int) -> dict[str, Any]:
    config = SHAPES["0.5b"]
    model = load(config, WeightLoader(RandomWeights(_CPU), torch.bfloat16, _CPU), config.context_length)
    blocks_of_each = [-(-tokens // BLOCK_SIZE) for _, tokens in _STEPS]
    most = max(batch * blocks for (batch, _), blocks in zip(_STEPS, blocks_of_each, strict=True))
    runners = []
    for layout in _layouts("0.5b"):
        # Written, so that each page is its own: 4e-5 in bf16, 1 in FP8.
        runners.append(ModelRunner(model, layout, layout.new_blocks(most, _CPU).fill_(0x38)))
    rows = {}
    for (batch, tokens), blocks in zip(_STEPS, blocks_of_each, strict=True):
        step = decode_step([list(range(i * blocks, (i + 1) * blocks)) for i in range(batch)], tokens)
        taken: list[list[float]] = [[], []]
        for turn in range(-_WARM_UPS, rounds):
            for which in (0, 1) if turn % 2 else (1, 0):
                began = time.perf_counter()
                compute(runners[which], step)
                if turn >= 0:
                    taken[which].append(time.perf_counter() - began)
        bf16_s, fp8_s = taken
        rows[f"{batch} of {tokens}"] = {
            "bf16_ms": spread([1e3 * one for one in bf16_s]),
            "fp8_ms": spread([1e3 * one for one in fp8_s]),
            "times_as_fast": spread([slow / fast for slow, fast in zip(bf16_s, fp8_s, strict=True)]),
        }
    return rows


def _show(results: dict[str, Any]) -> None:
    for shape, fits in results["tokens_in_1_gib"].items():
        print(f"{shape}: {fits['bf16']:,} tokens in a GiB, in FP8 {fits['fp8']:,} ({fits['fp8'] / fits['bf16']:.2f}x)")
    for name, told in results["log_probabilities"]["forms"].items():
        errors = f"mean error {told['mean_error']:.5f}, p99 {told['p99_error']:.4f}, most {told['largest_error']:.3f}"
        print(f"{name}: mean log-probability {told['mean_log_probability']:.5f}; {errors}")
    for name, shares in results["evaluation"].items():
        print(f"{name}: " + ", ".join(f"{task} {share:.1%}" for task, share in shares.items()))
    for name, row in results["decode"].items():
        print(
            f"decode, {name} tokens: {row['bf16_ms']['median']} ms, in FP8 {row['fp8_ms']['median']}, {row['times_as_fast']['median']}x"
        )


if __name__ == "__main__":
    main()

"""Pipeline stages of a model with uneven layers on this CPU: split by cost, or by number of layers.

`make bench-stages` runs it: python -m load_tests.scenarios.stages.

The model has dense layers, then layers of experts, and a head as large as several layers. Every stage's step is timed in turns, in one process with
one thread, with only that stage's parts of the model. In steady state, with as many steps in flight as stages, every stage waits for the slowest one
in each step: its idle share is 1 - its time / the slowest stage's time.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from load_tests.engine_speed import BLOCK_SIZE, RandomWeights, decode_step
from load_tests.records import write_record
from pilotlight.engine.core.chunk_steps import scratch_step
from pilotlight.engine.core.step import StepInput
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.packed_step import build_batch
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder, DecoderLayer
from pilotlight.engine.models.model_registry import find_family
from pilotlight.engine.planning.model_plan import PlannedModel, plan_model
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.kernels.cpu import library

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 768, "num_hidden_layers": 16, "num_attention_heads": 12, "num_key_value_heads": 4,
    "head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True,
    "mlp_only_layers": list(range(8)), "vocab_size": 32_000, "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
_CPU = torch.device("cpu")
_CONTEXT = 128  # tokens of each sequence that decodes
_STEPS = {"decode 1": 1, "decode 4": 4, "decode 16": 16, "prompt 256": 256}  # tokens of a step
_STAGES = (2, 4)

Work = Callable[[], object]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    library.start(wait=True)
    family, plan = find_family(_CONFIG), plan_model(_CONFIG)
    config = family.parse_config(_CONFIG)
    model = family.load(config, WeightLoader(RandomWeights(_CPU), torch.bfloat16, _CPU), 4096)
    assert isinstance(model, Decoder)
    layout = CacheLayout(config.cached_layers, BLOCK_SIZE, torch.bfloat16, 4096)
    found = {name: _measure(model, plan, layout, name, options.rounds) for name in _STEPS}
    results = {"config": _CONFIG, "threads": 1, "rounds": options.rounds, "steps": found}
    _show(found)
    print(f"Record: {write_record('stages', results)}")


def _measure(model: Decoder, plan: PlannedModel, layout: CacheLayout, name: str, rounds: int) -> dict[str, Any]:
    """Time each layer alone, and each stage of every split."""
    step = _step(name)
    blocks = layout.new_blocks(16 * -(-(_CONTEXT + 1) // BLOCK_SIZE) * len(layout.groups) + 256 // BLOCK_SIZE, _CPU)
    context = model.prepared(Context(build_batch(step, _CPU, None), layout.views(blocks)))
    hidden = torch.randn(len(step.token_ids), plan.config.hidden_size).bfloat16()
    rows = hidden[-1:] if name.startswith("prompt") else hidden

    def part(layers: range, is_first: bool) -> Work:
        def work() -> None:
            x, residual = model.run(layers, model.embed(context) if is_first else hidden, None, context)
            if is_first:
                model.logits(rows)
            else:
                x if residual is None else x + residual

        return work

    num_layers = len(plan.layers)
    cuts = {
        f"{n} stages, {how}": cut
        for n in _STAGES
        for how, cut in (
            ("cut by cost", plan.stages(n)),
            ("as many layers each", [range(num_layers * i // n, num_layers * (i + 1) // n) for i in range(n)]),
        )
    }
    stages = {(cut, i): part(of, i == 0) for cut, of_stages in cuts.items() for i, of in enumerate(of_stages)}
    layers = {("layer", i): part(range(i, i + 1), is_first=False) for i in range(num_layers)}
    times = _by_turns({**stages, **layers, **_parts(model, hidden, rows, context)}, rounds)
    layer_ms = [times["layer", i] for i in range(num_layers)]
    return {
        "layer_ms": layer_ms,
        "part_ms": {part: times[part, -1] for part in ("attention", "dense", "experts", "head")},
        "cuts": {
            cut: _of_cut([times[cut, i] for i in range(len(of))], [len(one) for one in of], max(layer_ms))
            for cut, of in cuts.items()
        },
    }


def _parts(model: Decoder, hidden: torch.Tensor, rows: torch.Tensor, context: Context) -> dict[tuple[str, int], Work]:
    """Return the timed parts by the kind of their weights: attention, feed-forward, experts and head."""
    dense, sparse = model.layers[4], model.layers[-4]
    assert isinstance(dense, DecoderLayer)
    assert isinstance(sparse, DecoderLayer)
    attention, feed_forward, experts = dense.attention, dense.feed_forward, sparse.feed_forward
    assert attention is not None
    assert feed_forward is not None
    assert experts is not None
    return {
        ("attention", -1): lambda: attention(hidden, context),
        ("dense", -1): lambda: feed_forward(hidden, context),
        ("experts", -1): lambda: experts(hidden, context),
        ("head", -1): lambda: model.logits(rows),
    }


def _of_cut(stage_ms: list[float], layers: list[int], layer_ms: float) -> dict[str, Any]:
    slowest, fastest = max(stage_ms), min(stage_ms)
    return {
        "layers": layers,
        "stage_ms": stage_ms,
        "difference_ms": round(slowest - fastest, 4),
        "is_balanced": slowest - fastest <= max(layer_ms, 0.1 * slowest),
        "worst_idle_share": round(1 - fastest / slowest, 3),
        "speed_up": round(sum(stage_ms) / slowest, 3),
    }


def _by_turns(works: dict[tuple[str, int], Work], rounds: int) -> dict[tuple[str, int], float]:
    """Run all works in turns; return the median processor time of each in milliseconds.

    Processor time is that of this thread, because other processes may interrupt it.
    """
    times: dict[tuple[str, int], list[float]] = {name: [] for name in works}
    for number in range(2 + rounds):
        for name, work in works.items():
            began = time.thread_time()
            work()
            if number >= 2:
                times[name].append(1e3 * (time.thread_time() - began))
    return {name: round(statistics.median(of), 4) for name, of in times.items()}


def _step(name: str) -> StepInput:
    if name.startswith("prompt"):
        return scratch_step([i % 1000 for i in range(_STEPS[name])], 0, BLOCK_SIZE)[0]
    blocks = -(-(_CONTEXT + 1) // BLOCK_SIZE)
    tables = [list(range(i * blocks, (i + 1) * blocks)) for i in range(_STEPS[name])]
    return decode_step(tables, _CONTEXT + 1)


def _show(found: dict[str, Any]) -> None:
    for name, of in found.items():
        print(f"{name}: layers take {', '.join(f'{ms:.2f}' for ms in of['layer_ms'])} ms, {of['part_ms']}")
        for cut, told in of["cuts"].items():
            stages = ", ".join(f"{n}: {ms:.2f} ms" for n, ms in zip(told["layers"], told["stage_ms"], strict=True))
            print(f"  {cut:32} {stages}; worst idle {told['worst_idle_share']:.1%}; balanced: {told['is_balanced']}")


if __name__ == "__main__":
    main()

"""Models with a recurrent state on this CPU, compared with transformers and with dense models.

The dense model has the same width; contexts are short and long:

    python -m load_tests.scenarios.states                 15 minutes
    python -m load_tests.scenarios.states --only granite-4 --rounds 3

The checkpoints have few layers of ordinary width and random weights, in bf16, and are written by transformers. Engines take turns in every round, so
that noise on the machine affects all of them; a figure is the median of the rounds' ratios. A model with only state layers and feed-forwards shows
their cost per token at 1,024 and at 32,768 tokens of context. The two must be equal if a token reads nothing of the past except the state. A whole
model's decodes at both contexts are compared with those that `pilotlight plan` predicts.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from rich.console import Console

from load_tests.peers.checkpoint import VOCAB
from load_tests.records import spread, write_record
from load_tests.scenarios.engines import OURS, RUNNERS, Answer, Process, Task, turns
from pilotlight.engine.planning.devices import DeviceSet, cpu
from pilotlight.engine.planning.model_plan import read_model
from pilotlight.engine.planning.planner import Workload, make_plan

SUBJECT = "states"
PEER = "transformers"
_SHORT = 1024  # tokens of context
_LAYERS = 8
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": _LAYERS, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 1 << 16, "tie_word_embeddings": False, "initializer_range": 0.02,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 8, "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 32, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_n_groups": 1, "num_local_experts": 0, "shared_intermediate_size": 3072,
}  # fmt: skip
_MIXED = ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * (_LAYERS // 4)
_STATES_ALONE = ["linear_attention"] * _LAYERS
# transformers' configuration class, and its arguments besides the sizes that all models share.
FAMILIES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", {"layer_types": _MIXED, **_DELTA}),
    "granite-4": ("GraniteMoeHybridConfig", {"layer_types": _MIXED, **_MAMBA}),
    "lfm2": (
        "Lfm2Config",
        {
            "layer_types": ["conv", "conv", "conv", "full_attention"] * (_LAYERS // 4),
            "block_auto_adjust_ff_dim": False,
        },
    ),
}
ALONE: dict[str, tuple[str, Mapping[str, Any]]] = {
    "qwen3.5": ("Qwen3_5TextConfig", {"layer_types": _STATES_ALONE, **_DELTA}),
    "granite-4": ("GraniteMoeHybridConfig", {"layer_types": _STATES_ALONE, **_MAMBA}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv"] * _LAYERS, "block_auto_adjust_ff_dim": False}),
}
_DENSE = ("Qwen3Config", {"layer_types": ["full_attention"] * _LAYERS})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--long", type=int, default=32768, help="tokens of the long context")
    options = parser.parse_args()
    console, families = Console(width=150), {}
    with TemporaryDirectory() as name:
        folder = Path(name)
        dense = _checkpoint(folder / "dense", *_DENSE)
        for family in options.only:
            hybrid = _checkpoint(folder / family, *FAMILIES[family])
            alone = _checkpoint(folder / f"{family}-alone", *ALONE[family])
            console.print(f"{family}:")
            families[family] = {
                "beside_others": _beside(hybrid, dense, folder, options, console),
                "at_long_contexts": _at_lengths(alone, folder, options, console),
                "whole": _beside_plan(hybrid, folder, options, console),
            }
    results = {
        "threads": options.threads,
        "rounds": options.rounds,
        "output_tokens": options.output_tokens,
        "families": families,
    }
    console.print(f"Record: {write_record(SUBJECT, results, ('torch', 'transformers'))}", soft_wrap=True)
    return 0


def _checkpoint(directory: Path, kind: str, changes: Mapping[str, Any]) -> Path:
    """Write a checkpoint in bf16 with random weights."""
    import torch
    import transformers

    config, kinds = getattr(transformers, kind)(**_SIZES, **changes), cast(Any, transformers.AutoModelForCausalLM)
    kinds.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def _beside(
    hybrid: Path, dense: Path, folder: Path, options: argparse.Namespace, console: Console
) -> list[dict[str, Any]]:
    """Measure a hybrid model with both engines, and a dense model with ours.

    Return our speed with the hybrid as ratios to the other two.
    """
    tasks = [Task("prefill", 1, tokens) for tokens in options.prompts]
    tasks += [Task("decode", batch, _SHORT) for batch in options.batches]
    with ExitStack() as scope:
        engines = {
            OURS: _ours(hybrid, folder, scope, options),
            PEER: Process(
                [sys.executable, str(RUNNERS / "run_transformers.py"), str(hybrid), str(options.threads)],
                folder / f"{PEER}.log",
                scope,
            ),
            "dense": _ours(dense, folder, scope, options),
        }
        found: dict[str, dict[Task, list[Answer]]] = {name: {task: [] for task in tasks} for name in engines}
        for turn, (_, task, name) in enumerate(turns(options.rounds, tasks, list(engines))):
            found[name][task].append(engines[name].run(task, seed=turn + 1, output_tokens=options.output_tokens))
    rows = []
    for task in tasks:
        speeds = {name: [answer.tokens_per_s for answer in of_task[task]] for name, of_task in found.items()}
        ratios = {
            f"times_{name}": spread([mine / other for mine, other in zip(speeds[OURS], speeds[name], strict=True)])
            for name in (PEER, "dense")
        }
        rows.append({**task._asdict(), **ratios, **{name: spread(values) for name, values in speeds.items()}})
        shown = ", ".join(f"{ratio['median']:.2f} {name.replace('_', ' ')}" for name, ratio in ratios.items())
        console.print(f"  {task}: {rows[-1][OURS]['median']:,.1f} tokens/s; {shown}", highlight=False)
    return rows


def _at_lengths(alone: Path, folder: Path, options: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Measure state layers and feed-forwards at two contexts.

    Return the time per token at the long context divided by that at the short one.
    """
    pairs = [
        ("prefill", Task("prefill", 1, _SHORT), Task("prefill", 1, options.long)),
        ("decode", Task("decode", 1, _SHORT), Task("decode", 1, options.long)),
    ]
    rows = []
    with ExitStack() as scope:
        ours = _ours(alone, folder, scope, options)
        for name, *both in pairs:
            taken: list[list[float]] = [[], []]
            for turn, (_, task, _name) in enumerate(turns(max(2, options.rounds // 2), both, [OURS])):
                answer = ours.run(task, seed=turn + 1, output_tokens=options.output_tokens)
                taken[both.index(task)].append(1 / answer.tokens_per_s)
            ratio = spread([at_long / at_short for at_short, at_long in zip(*taken, strict=True)])
            rows.append({"measure": name, "short": _SHORT, "long": options.long, "times_as_long": ratio})
            console.print(f"  {name} at {options.long:,} tokens: {ratio['median']:.2f} times as long", highlight=False)
    return rows


def _beside_plan(hybrid: Path, folder: Path, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compare a whole model's decodes at both contexts: measured and predicted."""
    short, long = (Task("decode", 1, context) for context in (_SHORT, options.long))
    taken: dict[Task, list[float]] = {short: [], long: []}
    with ExitStack() as scope:
        ours = _ours(hybrid, folder, scope, options)
        for turn, (_, task, _name) in enumerate(turns(max(2, options.rounds // 2), [short, long], [OURS])):
            taken[task].append(1 / ours.run(task, seed=turn + 1, output_tokens=options.output_tokens).tokens_per_s)
    short_s, long_s = (_predicted_s(hybrid, context) for context in (_SHORT, options.long))
    measured = spread([one / other for one, other in zip(taken[long], taken[short], strict=True)])
    predicted = long_s / short_s
    console.print(
        f"  a whole decode: {measured['median']:.2f} times as long, {predicted:.2f} predicted", highlight=False
    )
    return {"measured": measured, "predicted": predicted}


def _predicted_s(checkpoint: Path, context: int) -> float:
    """Return the seconds of one sequence's decode behind `context` tokens, as planned for a CPU."""
    workload = Workload(context, batch=1, prompt_tokens=context // 2)  # an answer as long as the prompt follows it
    speed = make_plan(read_model(checkpoint), DeviceSet(1, cpu()), workload).splits[0].speed
    assert speed is not None, "a model of this size fits"
    return speed.token_s


def _ours(checkpoint: Path, folder: Path, scope: ExitStack, options: argparse.Namespace) -> Process:
    command = [sys.executable, "-m", "load_tests.peers.run_pilotlight", str(checkpoint), str(options.threads)]
    return Process(command, folder / f"{checkpoint.name}.log", scope, {"GOMP_SPINCOUNT": "1000"})


if __name__ == "__main__":
    sys.exit(main())

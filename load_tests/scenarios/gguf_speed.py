"""GGUF files on this CPU, by this engine and by llama.cpp: prompts, decode steps and memory.

    python -m load_tests.scenarios.gguf_speed FILE.gguf ... --peers .peers        five minutes a file (make peers)

Both read the same file with equal numbers of threads, and take turns in every round, so that noise on the machine affects both; the figure is the
median of the rounds' ratios, ours over llama.cpp's. llama.cpp times itself (llama-batched-bench) with its own defaults: blocks repacked for the
machine's matrix units if it supports them. Peak memory is each process's own.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from load_tests.records import spread, write_record
from load_tests.scenarios.engines import OURS, ROOT, Answer, Engine, LlamaCpp, Process, Task, turns
from pilotlight.engine.gguf.directory import directory_of
from pilotlight.engine.weights.config import read_config

PEER = "llama.cpp"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each decoding sequence")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument(
        "--peer-flags",
        default="",
        help="flags of llama-batched-bench, such as --no-repack for an AMX build by gcc 12, which crashes",
    )
    options = parser.parse_args()
    program = next(iter(options.peers.glob("llama/*/vendor/llama.cpp/build/bin/llama-batched-bench")), None)
    if program is None:
        print("llama.cpp is not set up; run: make peers", file=sys.stderr)
        return 3
    console, files = Console(width=150), []
    for file in options.files:
        with TemporaryDirectory() as name, ExitStack() as scope:
            files.append(_compared(file, program, Path(name), scope, options, console))
    results = {
        "threads": options.threads,
        "rounds": options.rounds,
        "decode_context": options.context,
        "peer_flags": options.peer_flags,
        "files": files,
    }
    console.print(f"Record: {write_record('gguf-speed', results, ('torch',))}", soft_wrap=True)
    return 0


def _compared(
    file: Path, program: Path, folder: Path, scope: ExitStack, options: argparse.Namespace, console: Console
) -> dict[str, Any]:
    directory = directory_of(file, folder / "store")
    ours = [sys.executable, "-m", "load_tests.peers.run_pilotlight", str(directory), str(options.threads)]
    engines: dict[str, Engine] = {
        OURS: Process(ours, folder / "ours.log", scope, {"GOMP_SPINCOUNT": "1000"}),
        PEER: LlamaCpp(program, file, options.threads, folder / "llama.log", options.peer_flags.split()),
    }
    longest = read_config(directory).get("max_position_embeddings", 1 << 30)
    tasks = [Task("prefill", 1, tokens) for tokens in options.prompts if tokens < longest]
    tasks += [Task("decode", batch, options.context) for batch in options.batches]
    found: dict[str, dict[Task, list[Answer]]] = {name: {task: [] for task in tasks} for name in engines}
    for turn, (_, task, name) in enumerate(turns(options.rounds, tasks, list(engines))):
        found[name][task].append(engines[name].run(task, seed=turn + 1, output_tokens=options.output_tokens))
    rows = []
    for task in tasks:
        speeds = {name: [answer.tokens_per_s for answer in of_task[task]] for name, of_task in found.items()}
        ratio = spread([mine / theirs for mine, theirs in zip(speeds[OURS], speeds[PEER], strict=True)])
        rows.append({**task._asdict(), "ratio": ratio, **{name: spread(values) for name, values in speeds.items()}})
        console.print(
            f"{file.name}, {task}: {median(speeds[OURS]):,.1f} tokens/s and {median(speeds[PEER]):,.1f} of {PEER}; "
            f"ratio {ratio['median']:.2f} ({ratio['min']:.2f} to {ratio['max']:.2f})",
            highlight=False,
        )
    peaks = {
        name: max(answer.peak_rss_bytes for of_task in of_name.values() for answer in of_task)
        for name, of_name in found.items()
    }
    console.print(", ".join(f"{name} {peak >> 20:,} MiB at most" for name, peak in peaks.items()), highlight=False)
    return {"file": file.name, "bytes": file.stat().st_size, "rows": rows, "peak_rss_bytes": peaks}


if __name__ == "__main__":
    sys.exit(main())

"""This engine compared with others on one machine and checkpoint, in one run: `make bench-engine`.

`make peers` installs the others. The checkpoint has half a billion random weights in bf16. Prefill: time from a prompt to its first token. Decode:
output tokens per second of a batch, from the time when every sequence has its first token. The engines take turns in every round, so that noise on
the machine affects all of them; figures are medians over rounds. On shared machines the read bandwidth of memory changes by a factor of two within a
minute, so it is measured before and after each decode, and a decode is compared with the mean of the two.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

from load_tests.peers import checkpoint
from load_tests.records import spread, write_record

ROOT = Path(__file__).parents[2]
RUNNERS = ROOT / "load_tests" / "peers"
OURS, BEFORE = "pilotlight", "before"


class Task(NamedTuple):
    measure: str  # prefill or decode
    batch: int
    prompt_tokens: int

    def __str__(self) -> str:
        return f"prefill {self.prompt_tokens:,}" if self.measure == "prefill" else f"decode, batch {self.batch}"


class Answer(NamedTuple):
    tokens_per_s: float
    peak_rss_bytes: int
    read_gb_per_s: float = 0.0  # the machine's read bandwidth at the same time


class Engine(Protocol):
    def run(self, task: Task, seed: int, output_tokens: int) -> Answer: ...


class Process:
    """A runner process that executes commands. Its other output goes to a log."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        scope: ExitStack,
        environment: dict[str, str] | None = None,
        directory: Path = ROOT,
    ) -> None:
        self._log = log
        output = scope.enter_context(log.open("w"))
        self._process = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
        scope.callback(self._end)
        self._hear()

    def ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._hear()

    def run(self, task: Task, seed: int, output_tokens: int) -> Answer:
        answer = self.ask(**task._asdict(), seed=seed, output_tokens=output_tokens, vocab=checkpoint.VOCAB)
        return Answer(answer["tokens_per_s"], answer["peak_rss_bytes"])

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the runner ended with status {self._process.wait()}; see {self._log}")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def _end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LlamaCpp:
    """llama.cpp's own benchmark, once per task: it times itself, so its start does not count."""

    def __init__(self, program: Path, model: Path, threads: int, log: Path, flags: Sequence[str] = ()) -> None:
        self._command = [str(program), "-m", str(model), "-t", str(threads), "--output-format", "jsonl", *flags]
        self._log = log

    def run(self, task: Task, seed: int, output_tokens: int) -> Answer:
        generated = 1 if task.measure == "prefill" else output_tokens
        sizes = {"-npp": task.prompt_tokens, "-ntg": generated, "-npl": task.batch}
        context = task.batch * (task.prompt_tokens + generated + 32)
        options = [str(part) for option in {**sizes, "-c": context}.items() for part in option]
        with self._log.open("a") as log:
            process = subprocess.Popen([*self._command, *options], stdout=subprocess.PIPE, stderr=log, text=True)
            assert process.stdout is not None
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if process.returncode != 0 or not lines:
            raise RuntimeError(f"the runner ended with status {process.returncode}; see {self._log}")
        speed = lines[-1]["speed_pp" if task.measure == "prefill" else "speed_tg"]
        return Answer(speed, usage.ru_maxrss * 1024)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, default=ROOT / ".peers", help="the folder that make peers has filled")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompts", type=int, nargs="*", default=[512, 4096])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each decoding sequence")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--only", nargs="*", help="engines to measure, by name")
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="an older checkout, for comparison")
    options = parser.parse_args()
    if not (options.peers / "checkpoint" / "model.safetensors").exists():
        checkpoint.write_safetensors(options.peers / "checkpoint")
    tasks = [Task("prefill", 1, tokens) for tokens in options.prompts]
    tasks += [Task("decode", batch, options.context) for batch in options.batches]
    console = Console(width=150)
    with ExitStack() as scope:
        ceilings = Process(
            [sys.executable, "-m", "load_tests.ceilings", str(options.threads)], options.peers / "ceilings.log", scope
        )
        engines, absent = start_engines(options, scope, console)
        measured: dict[str, dict[Task, list[Answer]]] = {name: {task: [] for task in tasks} for name in engines}
        limits: dict[str, float] = {}
        for turn, (number, task, name) in enumerate(turns(options.rounds, tasks, list(engines))):
            if name == next(iter(engines)):
                limits = ceilings.ask()
            console.print(f"round {number + 1}: {task}, {name}", end=" ... ")
            try:
                before = ceilings.ask(now=True)["read_gb_per_s"]
                answer = engines[name].run(task, seed=turn + 1, output_tokens=options.output_tokens)
                answer = answer._replace(read_gb_per_s=(before + ceilings.ask(now=True)["read_gb_per_s"]) / 2)
            except (RuntimeError, OSError) as error:
                console.print(f"[red]{error}")
                absent[name] = str(error)
                continue
            measured[name][task].append(answer)
            console.print(f"{answer.tokens_per_s:,.1f} tokens/s, memory {answer.read_gb_per_s:.1f} GB/s")
    results = summarise(measured, limits, absent, options)
    if BEFORE in measured:
        results["ratio_to_before"] = {
            str(task): spread([now.tokens_per_s / old.tokens_per_s for now, old in zip(*pair, strict=True)])
            for task in tasks
            if len((pair := (measured[OURS][task], measured[BEFORE][task]))[0]) == len(pair[1]) > 0
        }
    show(console, results)
    console.print(f"Record: {write_record('engines', results, ('torch', 'transformers'))}", soft_wrap=True)
    return 0


def turns(rounds: int, tasks: list[Task], names: list[str]) -> Iterator[tuple[int, Task, str]]:
    """Yield (round, task, engine) in order; each round starts with another engine.

    This is fair, because the first engine runs on a cooler machine.
    """
    for number in range(rounds):
        for task in tasks:
            for i in range(len(names)):
                yield number, task, names[(i + number) % len(names)]


def start_engines(
    options: argparse.Namespace, scope: ExitStack, console: Console
) -> tuple[dict[str, Engine], dict[str, str]]:
    """Start the installed engines; return them, and for each other one why it is missing."""
    peers, threads = options.peers, options.threads
    model, set_up = peers / "checkpoint", "run: make peers"
    vllm = peers / "vllm" / "bin" / "python"
    llama = next(iter(peers.glob("llama/*/vendor/llama.cpp/build/bin/llama-batched-bench")), None)
    ours = [sys.executable, "-m", "load_tests.peers.run_pilotlight"]
    commands = {
        OURS: ours,
        **({BEFORE: ours} if options.before else {}),
        "transformers": [sys.executable, str(RUNNERS / "run_transformers.py")],
        "vllm": [str(vllm), str(RUNNERS / "run_vllm.py")],
    }
    engines: dict[str, Engine] = {}
    absent: dict[str, str] = {}
    for name in [*commands, "llama.cpp"]:
        if options.only and name not in options.only:
            continue
        try:
            with console.status(f"starting {name}"):
                if name == "llama.cpp":
                    if llama is None or not (model / "model.gguf").exists():
                        raise RuntimeError(set_up)
                    engines[name] = LlamaCpp(llama, model / "model.gguf", threads, peers / "llama.log")
                elif name == "vllm" and not vllm.exists():
                    raise RuntimeError(set_up)
                else:
                    command = [*commands[name], str(model), str(threads)]
                    # the same value as pilotlight.engine.host.engine_host sets
                    environment = {"GOMP_SPINCOUNT": "1000"} if commands[name] is ours else None
                    directory = options.before if name == BEFORE else ROOT
                    engines[name] = Process(command, peers / f"{name}.log", scope, environment, directory)
        except RuntimeError as error:
            absent[name] = str(error)
            console.print(f"{name} is left out: {error}")
    return engines, absent


def summarise(
    measured: dict[str, dict[Task, list[Answer]]],
    limits: dict[str, float],
    absent: dict[str, str],
    options: argparse.Namespace,
) -> dict[str, Any]:
    rows = []
    for name, tasks in measured.items():
        for task, answers in tasks.items():
            if not answers:
                continue
            shares = [share_of_ceiling(task, answer, limits, options.output_tokens) for answer in answers]
            rows.append(
                {
                    "engine": name,
                    **task._asdict(),
                    "tokens_per_s": spread([answer.tokens_per_s for answer in answers]),
                    "read_gb_per_s": spread([answer.read_gb_per_s for answer in answers]),
                    "share_of_ceiling": statistics.median(shares),
                }
            )
    peaks = {
        name: max(answer.peak_rss_bytes for answers in tasks.values() for answer in answers)
        for name, tasks in measured.items()
        if any(tasks.values())
    }
    return {
        "ceilings": limits,
        "weight_bytes_per_token": checkpoint.bytes_read_per_token(),
        "threads": options.threads,
        "rounds": options.rounds,
        "decode_context": options.context,
        "output_tokens": options.output_tokens,
        "rows": rows,
        "peak_rss_bytes": peaks,
        "absent": absent,
    }


def share_of_ceiling(task: Task, answer: Answer, limits: dict[str, float], output_tokens: int) -> float:
    """Return the share of the matmul rate for prompts, and of the read bandwidth for decode.

    Decode reads weights once per step and keys and values once per sequence.
    """
    tokens_per_s = answer.tokens_per_s
    if task.measure == "prefill":
        flops = checkpoint.flops_per_prompt(task.prompt_tokens) / task.prompt_tokens * tokens_per_s
        return flops / 1e12 / limits["bf16_tflop_per_s"]
    context = task.prompt_tokens + output_tokens / 2
    kv_bytes = 2 * 2 * checkpoint.LAYERS * checkpoint.KV_HEADS * checkpoint.HEAD_DIM * context
    step_bytes = checkpoint.bytes_read_per_token() + task.batch * kv_bytes
    return step_bytes * tokens_per_s / task.batch / 1e9 / answer.read_gb_per_s


def show(console: Console, results: dict[str, Any]) -> None:
    limits, rows = results["ceilings"], results["rows"]
    names = list(results["peak_rss_bytes"])
    console.print(
        f"\nThe machine: {limits['read_gb_per_s']:.1f} GB/s read, {limits['bf16_tflop_per_s']:.3f} TFLOP/s in bf16, "
        f"{limits['fp32_tflop_per_s']:.3f} in fp32, {results['threads']} threads; "
        f"{results['weight_bytes_per_token'] / 1e6:,.0f} MB of weights are read per step"
    )
    table = Table("tokens/s (share of ceiling)", *names, f"{OURS} / best other")
    speeds: dict[str, dict[str, Any]] = {}
    for row in rows:
        task = str(Task(row["measure"], row["batch"], row["prompt_tokens"]))
        speeds.setdefault(task, {})[row["engine"]] = row
    for task, by_engine in speeds.items():
        cells = [
            f"{by_engine[name]['tokens_per_s']['median']:,.1f} ({by_engine[name]['share_of_ceiling']:.0%})"
            if name in by_engine
            else "-"
            for name in names
        ]
        others = [row["tokens_per_s"]["median"] for name, row in by_engine.items() if name not in (OURS, BEFORE)]
        ours = by_engine.get(OURS)
        table.add_row(task, *cells, f"{ours['tokens_per_s']['median'] / max(others):.2f}" if ours and others else "-")
    for task, ratio in results.get("ratio_to_before", {}).items():
        console.print(f"{task}: {ratio['median']:.3f} of before ({ratio['min']:.3f} to {ratio['max']:.3f})")
    table.add_row("peak memory, GB", *(f"{results['peak_rss_bytes'][name] / 1e9:.2f}" for name in names), "")
    console.print(table)
    for name, reason in results["absent"].items():
        console.print(f"{name}: {reason}")


if __name__ == "__main__":
    sys.exit(main())

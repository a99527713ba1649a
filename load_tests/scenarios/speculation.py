"""The gains and costs of drafts. `make bench-speculation` runs it.

python -m load_tests.scenarios.speculation

Ratios above 1 are faster with drafts. There are four parts:

1. Ember answers held-out questions with drafts and without, in turns, in batches of 1 and of 8; the run fails if tokens differ. Each kind of question
   is a workload with a separate tenant. JSON and tools' schemas are enforced, as at a site. Long answers of a hundred tokens or more come from Ember
   with an adapter (load_tests/long_answers); answers to Ember's own corpus have some twenty.
2. The short answers, with drafters that have weights: a smaller model and an EAGLE-3 head.
3. 64 mixed streams, each replaced when it ends, with the usual drafters and with one that is always wrong.
4. A shape with random weights, whose own answers are proposed again, each token correct with a given probability: the cost of verification alone.
"""

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from load_tests.engine_speed import BLOCK_SIZE, SHAPES, make_runner
from load_tests.long_answers.corpus import ASKS
from load_tests.long_answers.train import merged
from load_tests.random_checkpoint import EMBER
from load_tests.records import spread, write_record
from pilotlight.engine.api.protocol import Constraint, HostConfig, ModelInfo, ModelSpec, SamplingParams, Submit
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.drafting.drafter import Draft, Drafter, known_tokens
from pilotlight.engine.drafting.drafter_registry import GrammarDrafter
from pilotlight.engine.drafting.model_drafter import ModelDrafter
from pilotlight.engine.drafting.speculator import Speculator
from pilotlight.engine.drafting.suffix import SuffixDrafter
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.scheduling.plan import Chunk, SchedulerLimits, StepCount
from pilotlight.engine.text.chat_template import ChatTemplate
from pilotlight.engine.text.formats import AnswerFormat, AnswerRules, CallableTool, Thinking
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.kernels.cpu import library
from training.ember.chat import Chat
from training.ember.corpus.conversation import Conversation, Split
from training.ember.corpus.mixture import conversation

# Workloads by the corpus's task. The model was trained on no answer to these questions.
LONG = {f"long: {name}": name for name in ASKS}
WORKLOADS = {
    "copying": "repeat", "quoting from far back": "long", "JSON with a schema": "json", "tool calls": "tools", "stories": "story",
    "free chat": "talk",
}  # fmt: skip
WITH_WEIGHTS = {"draft": "mini", "eagle3": "eagle3"}  # folders beside Ember's weights
BATCHES = (1, 8)
MAX_TOKENS, MAX_LONG_TOKENS = 120, 400
MIXED, FOLLOWING = 64, 3  # number of concurrent streams, and of requests that each place of a stream gets in turn
REPLAYED = (0.0, 0.6, 0.9, 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=60, help="per workload and batch, with drafts and without; a third warms up"
    )
    parser.add_argument("--mixed-rounds", type=int, default=9)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b", help="that replays drafts")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    console = Console()
    library.start(wait=True)
    results: dict[str, Any] = {"workloads": {}, "drafters": {}, "steps": {}}
    ember = Ember(options.threads)
    with TemporaryDirectory() as folder:
        trained = Ember(options.threads, directory=merged(Path(folder)))
        for asked, model, rounds in ((LONG, trained, options.rounds // 2), (WORKLOADS, ember, options.rounds)):
            for batch in BATCHES:
                for workload in asked:
                    with console.status(f"{workload}, batch {batch}"):
                        key = f"{workload}, batch {batch}"
                        results["workloads"][key], watch = model.compare(workload, batch, rounds)
                        results["drafters"][key], results["steps"][key] = watch.by_kind(), watch.steps()
    for name in WITH_WEIGHTS:
        by_model = Ember(options.threads, f"{name}:{EMBER / WITH_WEIGHTS[name]}")
        for workload in WORKLOADS:
            with console.status(f"{workload} by {name}"):
                key = f"{workload}, batch 1, {name}"
                results["workloads"][key], watch = by_model.compare(workload, 1, options.rounds // 2)
                results["drafters"][key], results["steps"][key] = watch.by_kind(), watch.steps()
    with console.status("mixed streams"):
        results["mixed"] = {
            "64 streams": ember.mixed([GrammarDrafter(), SuffixDrafter()], options.mixed_rounds),
            "64 streams, drafts that are always wrong": ember.mixed([Wrong()], options.mixed_rounds),
        }
    with console.status(f"replay on {options.shape}"):
        results["replay"] = {"shape": options.shape, **replay(options.shape)}
    show(console, results)
    console.print(f"Record: {write_record('speculation', results)}", soft_wrap=True)


class Watched(Speculator):
    """A speculator that records the outcome of each draft and each prediction."""

    def __init__(self, drafters: SequenceOf[Drafter], vocab_size: int, model: ModelDrafter | None = None) -> None:
        super().__init__(drafters, vocab_size, model=model)
        # By kind: how many tokens were accepted, and how many were verified whose predecessors were all correct.
        self.checked: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.accepted: list[int] = []  # accepted tokens of each verification
        self.predicted: list[tuple[int, float, float]] = []  # rows, predicted seconds, actual seconds

    def note(self, chunk: Chunk, num_accepted: int) -> None:
        for i, kind in enumerate(self._states[chunk.sequence].kinds[: min(num_accepted + 1, len(chunk.drafts))]):
            self.checked[kind][0] += i < num_accepted
            self.checked[kind][1] += 1
        self.accepted.append(num_accepted)
        super().note(chunk, num_accepted)

    def count_step(self, step: StepCount) -> None:
        if self.costs.is_known:
            self.predicted.append((step.num_rows, self.costs.predict_s(step.num_rows, step.num_drafts), step.step_s))
        super().count_step(step)

    def forget_past(self) -> None:
        """Reset the counts; the speculator keeps its estimates."""
        self.checked.clear()
        self.accepted, self.predicted = [], []

    def by_kind(self) -> dict[str, Any]:
        found = {kind: {"checked": n, "rate": round(right / n, 3)} for kind, (right, n) in sorted(self.checked.items())}
        length = round(1 + sum(self.accepted) / len(self.accepted), 3) if self.accepted else None
        return {"kinds": found, "acceptance_length": length, "checks": len(self.accepted)}

    def steps(self) -> dict[str, Any]:
        """Return predicted and actual milliseconds by rows, of steps without a long prompt."""
        by_rows: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for rows, predicted, actual in self.predicted:
            by_rows[rows].append((1e3 * predicted, 1e3 * actual))
        return {
            str(rows): {"predicted_ms": spread([p for p, _ in some]), "actual_ms": spread([a for _, a in some])}
            for rows, some in sorted(by_rows.items())
            if len(some) >= 8 and rows <= 128
        }


class Timed(NamedTuple):
    token_ids: dict[str, list[int]]
    whole_s: float
    decode_s: float  # from the time when every sequence had its first token
    decoded: int  # tokens in that time


class Ember:
    def __init__(self, threads: int | None, speculate: str = "off", directory: Path = EMBER) -> None:
        """Load Ember. `speculate`: the drafter with weights, or "off" for text-lookup drafters only."""
        config = HostConfig(kv_bytes=256 << 20, threads=threads)
        self.chat = Chat()
        self._answers = AnswerFormat.of(Tokenizer.from_directory(EMBER), ChatTemplate.from_directory(EMBER))
        self.plain, self.drafting = (
            load_model(
                ModelSpec("ember", str(directory), "float32", 16384, speculate=words), config, make_kv_memory(config)
            ).engine
            for words in ("off", speculate)
        )
        loaded = self.drafting.speculation
        self.model = loaded.model if isinstance(loaded, Speculator) else None

    def compare(self, workload: str, batch: int, rounds: int) -> tuple[dict[str, Any], Watched]:
        watch = self._speculate([] if self.model else [GrammarDrafter(), SuffixDrafter()])
        draw = random.Random(f"{workload} {batch}")
        warm_up = rounds // 3
        timed: list[tuple[Timed, Timed]] = []
        for index in range(rounds):
            if index == warm_up:
                watch.forget_past()
            asked = [self._submit(str(i), workload, draw, workload) for i in range(batch)]
            timed.append(self._both(asked, index))
        kept = timed[warm_up:]
        return _ratios(kept), watch

    def mixed(self, drafters: SequenceOf[Drafter], rounds: int) -> dict[str, Any]:
        """Measure streams of all kinds except JSON, each with a fixed number of tokens.

        When one ends, another starts: in a fixed batch the slowest stream would determine the time, whatever the other streams' drafts save.
        """
        self._speculate(drafters)
        draw = random.Random(7)
        workloads = [workload for workload, task in WORKLOADS.items() if task not in ("json", "long")]
        timed = []
        for index in range(rounds):
            asked = [
                self._submit(str(i), draw.choice(workloads), draw, f"tenant {i % 8}", ends=False)
                for i in range(MIXED * FOLLOWING)
            ]
            timed.append(self._both(asked, index))
        return _ratios(timed[rounds // 3 :])

    def _speculate(self, drafters: SequenceOf[Drafter]) -> Watched:
        watch = Watched(drafters, self.drafting.info.vocab_size, self.model)
        self.drafting.speculation = watch
        for engine in (self.drafting, self.plain):
            engine._begin_anew(engine.scheduler.limits, engine.scheduler.lease)  # a cold prefix cache
        return watch

    def _both(self, asked: list[Submit], index: int) -> tuple[Timed, Timed]:
        order = [self.plain, self.drafting]
        found = {engine: run(engine, asked) for engine in (order if index % 2 else order[::-1])}
        plain, drafting = found[self.plain], found[self.drafting]
        if plain.token_ids != drafting.token_ids:
            raise SystemExit(f"drafts changed tokens: {plain.token_ids} became {drafting.token_ids}")
        return plain, drafting

    def _submit(self, name: str, workload: str, draw: random.Random, tenant: str, ends: bool = True) -> Submit:
        while True:
            rng = random.Random(draw.random())
            if workload in LONG:
                asked, most = ASKS[LONG[workload]](rng, Split.HELD_OUT), MAX_LONG_TOKENS
            else:
                asked, most = conversation(rng, WORKLOADS[workload], Split.HELD_OUT), MAX_TOKENS
            prompt = tuple(self.chat.prompt(asked.messages[:-1], asked.tools))
            constraint = (
                _schema_of(asked) if asked.task in ("json", "records") else self._calls(asked) if ends else None
            )
            if len(prompt) < 2000 and (constraint is not None or asked.task != "json"):
                break
        sampling = SamplingParams(most if ends else 64, temperature=0.0, ignore_eos=not ends)
        return Submit(name, "ember", prompt, sampling, tenant.encode(), constraint=constraint)

    def _calls(self, asked: Conversation) -> Constraint | None:
        """Return a constraint of optional tool calls to their tools' schemas."""
        if not asked.tools:
            return None
        functions = [tool["function"] for tool in asked.tools]
        tools = tuple(CallableTool(each["name"], _closed(each["parameters"])) for each in functions)
        rules = AnswerRules(tools, may_be_text=True)
        return Constraint("lark", self._answers.grammar(Thinking.CLOSED, rules), is_optional=True)


def _schema_of(asked: Conversation) -> Constraint | None:
    """Return a constraint to the schema at the end of a system message; None if it has no schema."""
    text = str(asked.messages[0]["content"])
    try:
        schema = json.loads(text[text.index("{") :])
    except ValueError:
        return None
    return Constraint("json_schema", json.dumps(_closed(schema)))


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}


def run(engine: Engine, asked: list[Submit]) -> Timed:
    """Answer all requests. The clock starts when grammars have been compiled, after the first prompts."""
    for submit in asked:
        engine.submit(submit)
    while engine.has_work and not engine.step():
        time.sleep(0.001)
    token_ids: dict[str, list[int]] = {submit.sequence_id: [] for submit in asked}
    began, started, before = time.perf_counter(), 0.0, 0
    while engine.has_work or engine.sequences.has_outputs:
        for output in engine.sequences.take_outputs():
            assert output.error_message is None, output.error_message
            token_ids[output.sequence_id] += output.token_ids
        engine.on_idle()
        if not started and all(token_ids.values()):
            started, before = time.perf_counter(), sum(map(len, token_ids.values()))
        if engine.has_work:
            engine.step()
    ended = time.perf_counter()
    return Timed(token_ids, ended - began, ended - started, sum(map(len, token_ids.values())) - before)


def _ratios(timed: list[tuple[Timed, Timed]]) -> dict[str, Any]:
    """Compare decoding and whole answers, round by round and over all rounds."""
    decoded = [(a, b) for a, b in timed if a.decoded]
    plain_s, drafting_s = sum(a.decode_s for a, _ in decoded), sum(b.decode_s for _, b in decoded)
    tokens = sum(a.decoded for a, _ in decoded)
    return {
        "tokens": tokens,
        "tokens_per_s": {"without": round(tokens / plain_s, 1), "with": round(sum(b.decoded for _, b in decoded) / drafting_s, 1)},
        "decode_ratio": spread([a.decode_s / a.decoded * b.decoded / b.decode_s for a, b in decoded if b.decoded]),
        "decode_ratio_of_all": round(plain_s / tokens * sum(b.decoded for _, b in decoded) / drafting_s, 3),
        "answer_ratio": spread([a.whole_s / b.whole_s for a, b in timed]),
    }  # fmt: skip


class Wrong:
    """A drafter whose proposals are as long as allowed and always wrong."""

    name = "wrong"

    def __init__(self) -> None:
        self._draw = random.Random(1)

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        return Draft([self._draw.randrange(1, 20) for _ in range(most)], self.name, 0.9)

    def forget(self, sequence: Sequence) -> None:
        pass


class Replay:
    """A drafter that proposes the known answers, with each token correct with the probability `chance`."""

    name = "replay"

    def __init__(self, answers: dict[str, list[int]], chance: float) -> None:
        self._answers = answers
        self._chance = chance
        self._draw = random.Random(3)

    def propose(self, sequence: Sequence, ahead: SequenceOf[int], most: int) -> Draft | None:
        answer = self._answers[sequence.sequence_id]
        at = known_tokens(sequence) - sequence.num_prompt_tokens + len(ahead)
        found = [
            token if self._draw.random() < self._chance else (token + 1) % 1000 for token in answer[at : at + most]
        ]
        return Draft(found, self.name, self._chance) if found else None

    def forget(self, sequence: Sequence) -> None:
        pass


def replay(shape: str) -> dict[str, Any]:
    config, on_gpu = SHAPES[shape], torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    # A CPU computes in fp32: in bf16, random weights have so many near ties that steps of more rows choose other tokens than the replayed answers.
    dtype = torch.bfloat16 if on_gpu else torch.float32
    runner = make_runner(config, device, dtype, 8 * 512)
    info = ModelInfo(
        "m", config.context_length, config.vocab_size, (), str(dtype), BLOCK_SIZE, len(runner.kv_cache), 1, 0.0
    )
    limits, draw = SchedulerLimits(BLOCK_SIZE, 2048, 8, 8), random.Random(5)
    found: dict[str, Any] = {}
    for batch in BATCHES:
        asked = [
            Submit(
                str(i),
                "m",
                tuple(draw.choices(range(1000), k=64)),
                SamplingParams(64, temperature=0.0, ignore_eos=True),
            )
            for i in range(batch)
        ]
        answers = run(Engine(info, runner, limits), asked).token_ids
        for chance in REPLAYED:
            drafting = Engine(
                info, runner, limits, speculation=Speculator([Replay(answers, chance)], config.vocab_size)
            )
            plain_s, drafting_s = [], []
            for _ in range(4):
                plain, guessed = run(Engine(info, runner, limits), asked), run(drafting, asked)
                plain_s.append(plain.decode_s / plain.decoded)
                drafting_s.append(guessed.decode_s / guessed.decoded)
            counts = drafting.load().drafts
            found[f"batch {batch}, each right with {chance}"] = {
                "decode_ratio": spread([a / b for a, b in zip(plain_s[1:], drafting_s[1:], strict=True)]),
                "accepted": round(counts.num_accepted_tokens / max(1, counts.num_draft_tokens), 3),
                "acceptance_length": round(1 + counts.num_accepted_tokens / max(1, counts.num_drafts), 2),
            }
    return found


def rows(results: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], str]]:
    for name, found in results["workloads"].items():
        yield name, found["decode_ratio"], str(results["drafters"][name]["acceptance_length"] or "-")
    for name, found in results["mixed"].items():
        yield name, found["answer_ratio"], "-"
    for name, found in results["replay"].items():
        if isinstance(found, dict):
            yield (
                f"{results['replay']['shape']} replays, {name}",
                found["decode_ratio"],
                str(found["acceptance_length"]),
            )


def show(console: Console, results: dict[str, Any]) -> None:
    table = Table(
        "workload", "times as fast, decoding", "min", "max", "n", "acceptance length", box=None, header_style="bold"
    )
    for name, ratio, length in rows(results):
        table.add_row(name, *(str(ratio[key]) for key in ("median", "min", "max", "n")), length)
    console.print(table)


if __name__ == "__main__":
    main()

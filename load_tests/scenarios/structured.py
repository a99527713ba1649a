"""Structured outputs: does every finished answer validate, and what do masks cost?

python -m load_tests.scenarios.structured

Conformance: Ember, and a model with random weights at temperature 1.5, answer random schemas and those of JSON Schema's own test suite (--suite, a
checkout of it), 64 sequences at a time. The jsonschema package validates finished answers. Some unconstrained sequences run in the same batches, and
must have the same tokens as alone. Cost: the 0.5B shape with a vocabulary of 128k; batches of 16 with a schema and batches of 16 without take turns.
"""

import argparse
import dataclasses
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
from rich.console import Console

from load_tests import random_checkpoint
from load_tests.engine_speed import BLOCK_SIZE, SHAPES, make_runner
from load_tests.random_checkpoint import EMBER, Shape
from load_tests.records import percentiles, spread, write_record
from load_tests.schemas import schemas
from pilotlight.engine.api.protocol import Constraint, HostConfig, ModelInfo, ModelSpec, SamplingParams, Submit
from pilotlight.engine.api.struct import replace
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.grammar.constraints import Grammars
from pilotlight.engine.grammar.grammar_compiler import GrammarCompiler
from pilotlight.engine.grammar.matcher import ConstraintError
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.scheduling.plan import SchedulerLimits
from pilotlight.engine.tokenizer.tokenizer import Tokenizer
from pilotlight.kernels.cpu import library

BATCH = 64
MAX_TOKENS = 160
SUITE_DRAFT, SUITE_ROUNDS = "draft2020-12", 5
COST_BATCH, COST_TOKENS, VOCABULARY = 16, 48, 128_256
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemas", type=int, default=2000)
    parser.add_argument("--suite", type=Path, help="a checkout of github.com/json-schema-org/JSON-Schema-Test-Suite")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the cost, each with a schema and without")
    options = parser.parse_args()
    console = Console()
    library.start(wait=True)
    asked = [json.dumps(schema) for schema in schemas(options.schemas)]
    groups = {"conformance": asked}
    if options.suite is not None:
        groups["suite"] = suite_schemas(options.suite) * SUITE_ROUNDS
    results: dict[str, Any] = {group: {} for group in groups}
    with tempfile.TemporaryDirectory() as folder:
        random_model = random_checkpoint.write(Path(folder) / "random", Shape(128, 256, 2, 4, 2, 32))
        for name, directory in (("ember", EMBER), ("random weights", random_model)):
            for group, wanted in groups.items():
                with console.status(f"{len(wanted)} schemas by {name}"):
                    results[group][name] = conformance(directory, wanted)
                console.print(group, name, results[group][name])
    results["compile_ms"] = compile_times(asked)
    with console.status("cost"):
        results["cost"] = cost(options.rounds)
    console.print(results["compile_ms"], results["cost"])
    console.print(
        f"Record: {write_record('structured', results, ('torch', 'llguidance', 'jsonschema'))}", soft_wrap=True
    )


def suite_schemas(checkout: Path) -> list[str]:
    """Return the distinct schemas of the suite's newest draft, including optional tests.

    The schemas true and false are skipped.
    """
    found: dict[str, None] = {}
    for file in sorted((checkout / "tests" / SUITE_DRAFT).rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            if isinstance(case["schema"], dict):
                found.setdefault(json.dumps(case["schema"]))
    if not found:
        raise SystemExit(f"{checkout} has no tests/{SUITE_DRAFT}: it is not a checkout of JSON Schema's test suite")
    return list(found)


def conformance(directory: Path, asked: list[str]) -> dict[str, Any]:
    config = HostConfig(kv_bytes=512 << 20)
    engine = load_model(ModelSpec("m", str(directory), "float32"), config, make_kv_memory(config)).engine
    tokenizer = Tokenizer.from_directory(directory)
    prompt = tokenizer.encode("Answer in JSON: ")
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5)
    outcomes: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    wrong: list[dict[str, str]] = []
    free = [Submit(f"free{i}", "m", prompt, replace(params, seed=i, max_tokens=40, ignore_eos=True)) for i in range(4)]
    alone = answers(engine, free)
    began = time.perf_counter()
    for start in range(0, len(asked), BATCH - len(free)):
        part = asked[start : start + BATCH - len(free)]
        constrained = [
            Submit(str(i), "m", prompt, replace(params, seed=start + i), constraint=Constraint("json_schema", schema))
            for i, schema in enumerate(part)
        ]
        heard = answers(engine, [*constrained, *free])
        outcomes["neighbours changed"] += sum(heard[each.sequence_id] != alone[each.sequence_id] for each in free)
        for i, schema in enumerate(part):
            token_ids, reason, error = heard[str(i)]
            if reason != "stop":
                outcomes["refused" if error.startswith("the JSON schema") else reason] += 1
                refused.update([error] if reason == "error" else ())
                continue
            text = tokenizer.decode([token for token in token_ids if token not in engine.info.eos_token_ids])
            try:
                problem = invalid(text, schema)
            except (re.error, InvalidOperation):  # a JavaScript pattern or a number that Python does not support
                outcomes["not judged"] += 1
                continue
            outcomes["valid" if problem is None else "invalid"] += 1
            if problem is not None:
                wrong.append({"schema": schema, "answer": text, "problem": problem})
    seconds = time.perf_counter() - began
    engine.close()
    return {
        "schemas": len(asked), **outcomes, "seconds": round(seconds, 1), "refusals": dict(refused.most_common(12)), "wrong": wrong[:20],
    }  # fmt: skip


def answers(engine: Engine, submits: list[Submit]) -> dict[str, tuple[list[int], str, str]]:
    """Return each sequence's tokens, its finish reason, and why it failed."""
    heard: dict[str, tuple[list[int], str, str]] = {submit.sequence_id: ([], "", "") for submit in submits}
    for submit in submits:
        engine.submit(submit)
    while engine.has_work or engine.sequences.has_outputs:
        for output in engine.sequences.take_outputs():
            tokens, _, _ = heard[output.sequence_id]
            heard[output.sequence_id] = (
                [*tokens, *output.token_ids], output.finish_reason or "", output.error_message or "",
            )  # fmt: skip
        if engine.has_work and not engine.step():
            time.sleep(0.0005)  # wait for grammars to be compiled
    return heard


def invalid(text: str, schema: str) -> str | None:
    """Return why an answer does not validate; None if it does."""
    try:
        document, form = (json.loads(each, parse_float=Decimal) for each in (text, schema))
        JUDGE(form).validate(document)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0]
    return None


def matches_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    r"""Yield an error if a string does not match the pattern, with JavaScript's character classes.

    \d and \w match ASCII only, as in Python with re.ASCII; \s matches all white space, as in Python without it.
    """
    flags = re.ASCII if r"\s" not in pattern.lower() else 0
    if isinstance(instance, str) and not re.search(pattern, instance, flags):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def is_multiple(validator: Any, of: Any, instance: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    """Yield an error if a number is not a multiple of `of`, computed in decimal.

    In floats, 4766315.4553 is not a multiple of 0.0001.
    """
    if isinstance(instance, int | Decimal) and not isinstance(instance, bool):
        with localcontext(prec=700):  # more digits than a document has
            remainder = Decimal(instance) % Decimal(of)
        if remainder:
            yield jsonschema.ValidationError(f"{instance!r} is not a multiple of {of!r}")


JUDGE = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"pattern": matches_pattern, "multipleOf": is_multiple}
)


def compile_times(asked: list[str]) -> dict[str, Any]:
    tokenizer = Tokenizer.from_directory(EMBER)
    grammars = Grammars(GrammarCompiler(EMBER, tokenizer.vocab_size, (0, 2)))
    taken: list[float] = []
    masks, mask_s = 0, 0.0
    for schema in [asked[0], *asked]:  # the first request also loads the tokenizer
        began = time.perf_counter()
        try:
            matcher = grammars.compile(Constraint("json_schema", schema)).result()
        except ConstraintError:
            continue
        taken.append(1e3 * (time.perf_counter() - began))
        began = time.perf_counter()
        for _ in range(5):
            matcher.mask()
        mask_s += time.perf_counter() - began
        masks += 5
    grammars.close()
    return {**percentiles(taken[1:]), "masks_per_s": round(masks / mask_s), "vocabulary": tokenizer.vocab_size}


def cost(rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a step of the batch, with a schema for every sequence and without."""
    import torch

    shape = dataclasses.replace(SHAPES["0.5b"], vocab_size=VOCABULARY)
    runner = make_runner(shape, torch.device("cpu"), torch.bfloat16, 2 * COST_BATCH * (COST_TOKENS + 64))
    info = ModelInfo("m", shape.context_length, VOCABULARY, (2,), "bf16", BLOCK_SIZE, len(runner.kv_cache), 1, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        made = wide_tokenizer(Path(folder))
        grammars = Grammars(GrammarCompiler(made, VOCABULARY, (2,)))
        engine = Engine(info, runner, SchedulerLimits(BLOCK_SIZE, 2048, COST_BATCH, 1024), grammars=grammars)
        ms: dict[str, list[float]] = {"free": [], "schema": []}
        for number in range(rounds + 1):
            for kind, constraint in (("free", None), ("schema", Constraint("json_schema", json.dumps(PERSON)))):
                taken = batch_ms(engine, f"{kind}{number}", constraint)
                if number:  # the first round compiles and records
                    ms[kind].append(taken)
        engine.close()
    ratios = [with_schema / free for free, with_schema in zip(ms["free"], ms["schema"], strict=True)]
    return {
        "batch": COST_BATCH, "vocabulary": VOCABULARY, "ms_per_token": {kind: spread(values) for kind, values in ms.items()},
        "ratio": spread(ratios),
    }  # fmt: skip


def batch_ms(engine: Engine, name: str, constraint: Constraint | None) -> float:
    params = SamplingParams(
        max_tokens=COST_TOKENS, temperature=0.0, min_tokens=COST_TOKENS if constraint is None else 0
    )
    for i in range(COST_BATCH):
        engine.submit(Submit(f"{name}.{i}", "m", tuple(range(10 + i, 42 + i)), params, constraint=constraint))
    steps: list[float] = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        if len(engine.sequences.take_outputs()) == COST_BATCH:
            steps.append(1e3 * (time.perf_counter() - began))
    return sorted(steps)[len(steps) // 2]


def wide_tokenizer(folder: Path) -> Path:
    """Write Ember's tokenizer with the vocabulary size of a large model.

    The added tokens are random bytes.
    """
    fields = json.loads((EMBER / "tokenizer.json").read_text())
    vocabulary = fields["model"]["vocab"]
    letters = [token for token in vocabulary if len(token) == 1]
    number = 0
    taken = set(vocabulary.values()) | {token["id"] for token in fields["added_tokens"]}
    for token_id in range(VOCABULARY):
        while token_id not in taken:
            word = "".join(
                letters[(number * 7919 + place * 104729 + number // 97**place) % len(letters)]
                for place in range(4 + number % 5)
            )
            number += 1
            if word not in vocabulary:
                vocabulary[word] = token_id
                break
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    return folder


if __name__ == "__main__":
    main()

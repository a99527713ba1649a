"""A fuzzer for llguidance in guarded child processes.

`python -m load_tests.grammar_fuzz [--minutes 1] [--seed 1] [--out FILE]`

Random schemas, regular expressions and Lark grammars go through the same check as a client's (engine/grammar/grammar_check.py). Outcomes are counted
for each kind of grammar; an input that ended a child is printed, or written to a file, one JSON object per line. The exit status is 1 if a child was
lost other than by its own limits.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pilotlight.engine.api.guarded_pool import GuardedPool, JobEndedError, JobError
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_check import GrammarVocabulary, check_job
from training.ember.chat import HERE

VOCABULARY = GrammarVocabulary(HERE, 2048, (0,))
Kind = Literal["json_schema", "regex", "lark"]
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 7, 0.5, -0.5, 1.0, 0.1, 1e-7, 1e-300, 5e-324, 1e15, 1e21, 1e300, -1e300, 1.7e308, 2**31, 2**32, 2**53, 2**53 + 1, -(2**53), 2**62,
    2**63 - 1, 2**63 - 1024, 2**63, -(2**63), 1 - 2**63, 2**64 - 1, -9223372036854774784, 99999, 10**18, 1000000, 65536, 3.14159, 123456789.123,
)  # fmt: skip
TEXTS = (
    "", "a", "é", "日本", "\u0000", "\ud83d\ude00", "\"", "\\", "\n", "a" * 300, "<|im_end|>", "<tool_call>", "$ref", "#", "/", "%json", "\u2028",
    "\u202e", "null", "0", "x-guidance",
)  # fmt: skip
FORMATS = (
    "date-time",
    "date",
    "time",
    "email",
    "ipv4",
    "ipv6",
    "uri",
    "uuid",
    "hostname",
    "duration",
    "json-pointer",
    "iri",
    "none",
)
PIECES = (
    "a", "b", ".", "\\d", "\\w", "\\s", "\\S", "[a-z]", "[^a]", "[\\u0000-\\uffff]", "\\p{L}", "\\p{Greek}", "^", "$", "\\b", "\\B", "(?i)", "(?s)",
    "(?:x)", "é", "日", "\\x00", "\\u{10ffff}", "\\n", "[", "]", "\\", "(?=a)", "(?!a)", "(?<n>a)", "\\1", "&", "~", "[[:alpha:]]", "[a&&b]", "/",
)  # fmt: skip
LARK = (
    'start: "a"', "start: A", "A: /a+/", 'A: "a".."z"', "start: start start |", "start: a* b+ c?", 'a: "x"', "b: a | b a", 'c: "é" ~ 1..900',
    'start: %json {"type": "object"}', "start: %regex {}", "start: <|im_end|>", "start: <[1-5]>", "start: /(?s:.*)/", "%ignore /[ \\n]+/",
    "%llguidance {}", "T[lazy]: /.*/ \"x\"", "start[capture]: A", "start[max_tokens=3]: /.*/", "start[stop=\"x\"]: /.*/", "start: ~A", "A: /a/ & /b/",
    "A: ~/a/", "start: @x", '%lark { start: "a" }', "start: %lark {\nstart: \"a\"\n}", "A: \"a\"i", "start: A ~ 99999", "%import common.INT",
    "A: A \"a\" |", "start: (start)", "start: ((((((((a))))))))", "start: \"\"", "start: /\\u0000/",
)  # fmt: skip


def draw_schema(rng: random.Random, depth: int = 0) -> Any:
    if depth > 6 or rng.random() < 0.05:
        return rng.choice((True, False, {}, {"$ref": "#"}, {"$ref": "#/$defs/a"}))
    schema: dict[str, Any] = {}
    if rng.random() < 0.8:
        kinds = ["object", "array", "string", "integer", "number", "boolean", "null"]
        schema["type"] = rng.choice(kinds) if rng.random() < 0.9 else rng.sample(kinds, 2)
    for _ in range(rng.randrange(4)):
        key, value = rng.choice(WORDS)
        schema[key] = value(rng, depth)
    if depth == 0 and rng.random() < 0.2:
        schema["$defs"] = {"a": draw_schema(rng, 1)}
    if rng.random() < 0.01:
        for _ in range(rng.choice((20, 60, 120))):
            schema = {rng.choice(("items", "not", "additionalProperties")): schema}
    return schema


def draw_value(rng: random.Random, depth: int) -> Any:
    roll = rng.random()
    if roll < 0.5:
        return rng.choice(NUMBERS)
    if roll < 0.7:
        return rng.choice(TEXTS)
    if roll < 0.8 or depth > 4:
        return rng.choice((None, True, False))
    if roll < 0.9:
        return [draw_value(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(TEXTS): draw_value(rng, depth + 1) for _ in range(rng.randrange(3))}


def draw_number(rng: random.Random, depth: int) -> Any:
    return rng.choice(NUMBERS) if rng.random() < 0.8 else rng.randint(-(2**63), 2**64 - 1) // 10 ** rng.randrange(19)


def draw_list(rng: random.Random, depth: int) -> list[Any]:
    return [draw_schema(rng, depth + 1) for _ in range(rng.choice((0, 1, 2, 2, 3)))]


def draw_regex(rng: random.Random, depth: int = 0) -> str:
    parts = []
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        roll = rng.random()
        if roll < 0.15 and depth < 5:
            part = f"({draw_regex(rng, depth + 1)}|{draw_regex(rng, depth + 1)})"
        elif roll < 0.25 and depth < 5:
            part = f"({draw_regex(rng, depth + 1)})"
        else:
            part = rng.choice(PIECES)
        count = rng.choice(("1", "3", "40", "999", "90000", "4294967295", "99999999999"))
        parts.append(
            part + rng.choice(("", "", "", "*", "+", "?", "*?", f"{{{count}}}", f"{{1,{count}}}", f"{{{count},}}"))
        )
    return "".join(parts) * (rng.choice((10, 100, 400)) if rng.random() < 0.02 and depth == 0 else 1)


def draw_lark(rng: random.Random) -> str:
    lines = [rng.choice(LARK) for _ in range(rng.choice((1, 2, 3, 5, 8)))]
    if rng.random() < 0.3:
        lines.append(f"A: /{draw_regex(rng)}/")
    if rng.random() < 0.2:
        lines.append(f"b: %json {json.dumps(draw_schema(rng, 3))}")
    text = "\n".join(lines if any(line.startswith("start") for line in lines) else ["start: A", *lines])
    if rng.random() < 0.2:
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice((*TEXTS, *PIECES)) + text[at + rng.randrange(3) :]
    return text


Word = Callable[[random.Random, int], Any]
WORDS: tuple[tuple[str, Word], ...] = (
    *((name, draw_number) for name in (
        "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties",
        "maxProperties",
    )),
    ("const", draw_value),
    ("enum", lambda rng, depth: [draw_value(rng, depth) for _ in range(rng.randrange(4))]),
    ("pattern", lambda rng, depth: draw_regex(rng)),
    ("format", lambda rng, depth: rng.choice(FORMATS)),
    ("items", lambda rng, depth: draw_schema(rng, depth + 1)),
    ("prefixItems", draw_list), ("anyOf", draw_list), ("allOf", draw_list), ("oneOf", draw_list),
    ("properties", lambda rng, depth: {rng.choice(TEXTS): draw_schema(rng, depth + 1) for _ in range(rng.randrange(4))}),
    ("patternProperties", lambda rng, depth: {draw_regex(rng): draw_schema(rng, depth + 1)}),
    ("additionalProperties", lambda rng, depth: draw_schema(rng, depth + 1)),
    ("required", lambda rng, depth: rng.sample(TEXTS, 2)),
    ("x-guidance", lambda rng, depth: {"whitespace_pattern": draw_regex(rng), "coerce_one_of": True, "lenient": True}),
)  # fmt: skip


def drawn(kind: Kind, rng: random.Random) -> str:
    match kind:
        case "json_schema":
            return json.dumps(draw_schema(rng))
        case "regex":
            return draw_regex(rng)
        case "lark":
            return draw_lark(rng)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="a file for the inputs that ended a child")
    asked = parser.parse_args(argv)
    rng, pool = random.Random(asked.seed), GuardedPool(1)
    counts: dict[str, Counter[str]] = {kind: Counter() for kind in ("json_schema", "regex", "lark")}
    until = time.monotonic() + 60 * asked.minutes
    while time.monotonic() < until:
        kind: Kind = rng.choice(("json_schema", "json_schema", "regex", "lark"))
        text = drawn(kind, rng)
        try:
            pool.submit(check_job(VOCABULARY, Constraint(kind, text))).result()
            counts[kind]["taken"] += 1
        except JobError as error:
            counts[kind]["refused" if error.name == "ConstraintError" else error.name] += 1
        except JobEndedError as error:
            counts[kind][error.reason] += 1
            line = json.dumps({"kind": kind, "reason": error.reason, "message": str(error), "text": text})
            if asked.out is None:
                print(line, flush=True)
            else:
                with asked.out.open("a") as out:
                    out.write(line + "\n")
    pool.close()
    for kind_name, count in counts.items():
        print(f"{kind_name}: {count.total()} tried; " + ", ".join(f"{n} {what}" for what, n in count.most_common()))
    return int(any(count["lost"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""A client's grammar is first tried in a child process: a grammar that ends the child, or fails during an answer, is refused by name."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pilotlight.engine.api.guarded_pool import GuardedPool, JobEndedError, JobError
from pilotlight.engine.api.protocol import Constraint
from pilotlight.engine.grammar.grammar_check import GrammarVocabulary, check_job
from training.ember.chat import HERE

EMBER = GrammarVocabulary(HERE, 2048, (0,))


@pytest.fixture(scope="module")
def pool(process_tier: None) -> Iterator[GuardedPool]:
    made = GuardedPool(1)
    yield made
    made.close()


def check(pool: GuardedPool, kind: Any, text: str, vocabulary: GrammarVocabulary = EMBER) -> None:
    pool.submit(check_job(vocabulary, Constraint(kind, text))).result(timeout=120)


def schema(value: Any) -> str:
    return json.dumps(value)


def test_what_can_be_followed_passes(pool: GuardedPool) -> None:
    check(
        pool,
        "json_schema",
        schema({"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(300)}}),
    )
    check(pool, "regex", "(yes|no)[!?]")
    check(pool, "choice", '["red", "green"]')
    check(pool, "lark", 'start: NUM "+" NUM\nNUM: /[0-9]{1,3}/')


def test_what_crashes_the_child_is_the_grammar_s_fault(pool: GuardedPool) -> None:
    with pytest.raises(JobEndedError) as ended:
        check(pool, "json_schema", schema({"type": "integer", "const": -1e300}))
    assert (ended.value.reason, ended.value.is_jobs_fault) == ("crash", True)
    check(pool, "json_schema", schema({"type": "object"}))


CHAIN = "\n".join(f"r{i}: r{i + 1}" for i in range(10_000))
REFERENCES = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3_000)}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (
            "json_schema",
            schema({"allOf": [{"type": "string", "pattern": f".*{letter}0.*"} for letter in "abcdefghijklmnopqrst"]}),
        ),
        ("json_schema", schema({"multipleOf": 2147483648})),
        ("json_schema", schema({"type": ["integer", "null"], "multipleOf": 4660806})),
        ("json_schema", schema({"$defs": {**REFERENCES, "d3000": {}}, "$ref": "#/$defs/d0"})),
        ("regex", "\u65e5{4294967295}"),
        ("regex", r"(?i)\u{10ffff}{90000}\\"),
        ("regex", "(b{999}){90000,}"),
        ("lark", "start: A ~ 99999\nA: /a+/"),
        ("lark", f'start: r0\n{CHAIN}\nr10000: "a"'),
    ],
    ids=lambda value: value[:40],
)
def test_what_the_fuzz_has_found_ends_a_child_alone(pool: GuardedPool, kind: Any, text: str) -> None:
    job = check_job(EMBER, Constraint(kind, text))._replace(cpu_s=0.5, memory_bytes=64 << 20)
    with pytest.raises(JobEndedError) as ended:
        pool.submit(job).result(timeout=120)
    assert ended.value.reason != "lost"
    check(pool, "regex", "a")


def test_what_fails_in_the_middle_of_an_answer_is_refused(pool: GuardedPool) -> None:
    pattern = "^(a|aa|aaa)+(b|bb)+" + "(c|cc)?" * 400
    with pytest.raises(JobError) as refused:
        check(pool, "json_schema", schema({"type": "string", "pattern": pattern}))
    assert refused.value.name == "ConstraintError"
    assert "cannot be enforced" in str(refused.value)


def test_what_cannot_be_enforced_is_refused_by_name(pool: GuardedPool) -> None:
    with pytest.raises(JobError, match="Unimplemented keys") as refused:
        check(pool, "json_schema", schema({"not": {}}))
    assert refused.value.name == "ConstraintError"


def test_a_tokenizer_that_cannot_be_read_is_no_fault_of_the_grammar(pool: GuardedPool, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"tokenizer\.json") as refused:
        check(pool, "regex", "a", GrammarVocabulary(tmp_path, 10, (0,)))
    assert refused.value.name == "TokenizerUnreadableError"

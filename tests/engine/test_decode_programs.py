"""Decode steps recorded as programs of the CPU's C library. They compute the same bits as single operations, whatever happens to sequences in
between. Models that cannot be recorded run without programs, which is logged once.
"""

import gc
import logging
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pilotlight.engine.api.protocol import SamplingParams, Submit
from pilotlight.engine.core.chunk_steps import scratch_step, step_of
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.execution.decode_graphs import WANTED_TIMES, DecodeGraphs
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.models.model import Model
from pilotlight.engine.scheduling.plan import Chunk
from pilotlight.kernels.cpu import library
from tests.cpu_kernels import C_LIBRARY, TORCH, computing_with
from tests.engine.agreement import full
from tests.engine.driver import Heard, drain, load_engine, one, random_prompt, submit
from tests.engine.fake_drafter import Remembering
from tests.engine.families import FURTHER_RECORDED, MODELS, write_family
from tests.engine.test_quantized import INTEGERS
from tests.in_turn import in_turn

pytestmark = pytest.mark.cpu_only

DENSE = [name for name in MODELS if name.startswith(("llama", "qwen2", "qwen3,", "mistral", "gemma3"))]


@pytest.fixture(autouse=True)
def _the_c_library_computes() -> Iterator[None]:
    with computing_with(C_LIBRARY):
        yield


def runner_of(engine: Engine) -> ModelRunner:
    assert isinstance(engine.runner, ModelRunner)
    return engine.runner


def graphs_of(engine: Engine) -> DecodeGraphs:
    graphs = runner_of(engine).graphs
    assert graphs is not None
    return graphs


def by_calls(directory: Path, **options: Any) -> Engine:
    """Load an engine that records no programs."""
    engine = load_engine(directory, **options)
    runner_of(engine).graphs = None
    return engine


class Answers(NamedTuple):
    token_ids: list[int]
    logprobs: list[Any]
    num_cached_tokens: int | None

    @classmethod
    def of(cls, heard: dict[str, Heard]) -> "dict[str, Answers]":
        assert all(one.error is None for one in heard.values())
        return {name: cls(one.token_ids, one.logprobs, one.num_cached_tokens) for name, one in heard.items()}


def requests(count: int, max_tokens: int = 40) -> list[Submit]:
    """Return requests that report whole distributions. Their lengths differ, so that the batch shrinks."""
    return [full(str(i), random_prompt(3 + 7 * i, seed=i), max_tokens=max_tokens - 6 * i) for i in range(count)]


@pytest.mark.parametrize(("name", "dtype"), in_turn([*DENSE, *FURTHER_RECORDED], ["float32", "bfloat16"]))
def test_every_dense_family_is_recorded_and_computes_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    """Contexts grow over many block boundaries, and over every window."""
    write_family(tmp_path, name, getattr(torch, dtype))
    options = {"dtype": dtype, "block_size": 4, "kv_tokens": 600}
    expected = Answers.of(drain(by_calls(tmp_path, **options), requests(5)))
    engine = load_engine(tmp_path, **options)
    assert Answers.of(drain(engine, requests(5))) == expected
    assert graphs_of(engine).num_graphs == 5, "one program for each batch size from one to five"


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["awq", "eight bits in words"])
def test_weights_in_codes_are_recorded_and_compute_the_same_bits(name: str, dtype: str, tmp_path: Path) -> None:
    if not library.takes_codes():
        pytest.skip("this CPU unpacks them")
    INTEGERS[name](tmp_path)
    options = {"dtype": dtype, "block_size": 4, "kv_tokens": 600}
    expected = Answers.of(drain(by_calls(tmp_path, **options), requests(5)))
    engine = load_engine(tmp_path, **options)
    assert Answers.of(drain(engine, requests(5))) == expected
    assert graphs_of(engine).num_graphs == 5


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*(name for name in MODELS if name not in DENSE), "granite, scaled at each seam", "olmo2, normed behind"]
)
def test_a_family_with_a_part_that_torch_computes_runs_without_and_logs_it_once(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_family(tmp_path, name)
    expected = Answers.of(drain(by_calls(tmp_path), requests(3, max_tokens=20)))
    engine = load_engine(tmp_path)
    with caplog.at_level(logging.INFO):
        assert Answers.of(drain(engine, requests(3, max_tokens=20))) == expected
    assert graphs_of(engine).num_graphs == 0
    said = [record.message for record in caplog.records if "cannot be recorded" in record.message]
    assert len(said) == 1
    assert "part of it is computed by torch" in said[0]


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"kv_tokens": 160, "max_num_batched_tokens": 50},
        {"depth": 2},
        {"depth": 2, "kv_tokens": 160, "max_num_batched_tokens": 50},
        {"block_size": 1, "kv_tokens": 400},
    ],
    ids=["preempted", "overlapped", "overlapped and preempted", "tables that outgrow a recording's"],
)
def test_the_same_bits_whatever_happens_to_a_sequence(checkpoint: Path, options: dict[str, Any]) -> None:
    many = [full(str(i), random_prompt(20 + i, seed=i), max_tokens=40) for i in range(4)]
    reference = by_calls(checkpoint, **options)
    expected = Answers.of(drain(reference, many))
    engine = load_engine(checkpoint, **options)
    assert Answers.of(drain(engine, many)) == expected
    assert engine.scheduler.counts.preemptions == reference.scheduler.counts.preemptions
    assert (options.get("kv_tokens") == 160) == (engine.scheduler.counts.preemptions > 0)
    assert graphs_of(engine).num_graphs > 0


# Families are tested one by one elsewhere; here every third one is enough to test drafts.
DRAFTED = [
    pytest.param(name, ("float32", "bfloat16")[i % 2], marks=[] if i % 3 == 0 else pytest.mark.slow)
    for i, name in enumerate(DENSE)
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "dtype"), DRAFTED)
def test_steps_that_check_drafts_are_recorded_and_compute_the_bits_of_decoding(
    name: str, dtype: str, tmp_path: Path
) -> None:
    write_family(tmp_path, name, getattr(torch, dtype))
    options = {"dtype": dtype, "block_size": 4, "kv_tokens": 600}
    alone = [full(str(i), random_prompt(3 + 9 * i, seed=i), max_tokens=24) for i in range(3)]
    expected = Answers.of(drain(by_calls(tmp_path, **options), alone))
    answers = {message.prompt_token_ids: expected[message.sequence_id].token_ids for message in alone}
    for num_drafts in (3, None):  # three for each sequence, or a random number
        engine, reference = load_engine(tmp_path, **options), by_calls(tmp_path, **options)
        for drafting in (engine, reference):
            drafting.scheduler.speculation = Remembering(answers, num_drafts)
        for batch in ([alone[0]], alone, [alone[1]], alone, alone):
            found = Answers.of(drain(engine, batch))
            assert found == Answers.of(drain(reference, batch))
            assert dtype == "bfloat16" or all(found[name].token_ids == expected[name].token_ids for name in found)
        shapes = graphs_of(engine).recorded
        assert any(shape.longest > 1 and shape.sequences == 1 for shape in shapes)
        assert num_drafts is None or any(shape.longest > 1 and shape.sequences > 1 for shape in shapes)


def test_a_token_among_drafts_has_the_logits_that_decoding_gives_it(checkpoint: Path) -> None:
    """The logits are bit-identical."""
    runner, prompt = runner_of(load_engine(checkpoint)), random_prompt(30, seed=1)
    runner.forward(scratch_step(prompt[:21], 0, runner.layout.block_size)[0])
    sequence = Sequence("", prompt[:22], SamplingParams(max_tokens=9), b"", num_computed_tokens=21)
    sequence.tables = [BlockTable(range(4))]
    checked = step_of([Chunk.next_of(sequence, 1, drafts=tuple(prompt[22:]))], runner.layout.block_size)
    for _ in range(WANTED_TIMES + 2):
        together = runner.forward(checked).logits
    assert together is not None
    for i, row in enumerate(together.clone()):
        one = runner.forward(scratch_step(prompt[: 22 + i], 21 + i, runner.layout.block_size)[0]).logits
        assert one is not None
        assert torch.equal(one[0], row)


def test_prefix_hits_are_read_through_recorded_tables(checkpoint: Path) -> None:
    prompt = random_prompt(70, seed=1)

    def answers(engine: Engine) -> list[dict[str, Answers]]:
        return [Answers.of(drain(engine, [full("a", [*prompt, n], max_tokens=20)])) for n in range(3, 9)]

    engine = load_engine(checkpoint)
    found = answers(engine)
    assert found == answers(by_calls(checkpoint))
    assert [answer["a"].num_cached_tokens for answer in found] == [0] + [64] * 5
    assert graphs_of(engine).num_graphs == 1


def test_drawn_and_penalised_tokens_are_the_same(checkpoint: Path) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.9, "seed": 4},
        {"repetition_penalty": 1.3, "logit_bias": ((7, 2.0),)},
    ]
    many = [submit(str(i), random_prompt(9 + i, seed=i), max_tokens=30, **kinds[i % 2]) for i in range(4)]
    assert Answers.of(drain(load_engine(checkpoint), many)) == Answers.of(drain(by_calls(checkpoint), many))


def test_prompts_and_decodes_in_one_step_are_computed_by_calls(checkpoint: Path) -> None:
    engine = load_engine(checkpoint, max_num_batched_tokens=8)
    reference = by_calls(checkpoint, max_num_batched_tokens=8)
    many = [
        full("short", random_prompt(3, seed=1), max_tokens=30),
        full("long", random_prompt(90, seed=2), max_tokens=9),
    ]
    assert Answers.of(drain(engine, many)) == Answers.of(drain(reference, many))


def test_a_model_that_moves_in_memory_is_recorded_anew_and_the_old_one_let_go(checkpoint: Path) -> None:
    message = full("a", random_prompt(9, seed=1), max_tokens=12)
    expected = Answers.of(drain(by_calls(checkpoint), [message]))
    engine, other = load_engine(checkpoint), load_engine(checkpoint)
    runner = runner_of(engine)
    assert Answers.of(drain(engine, [message])) == expected
    assert graphs_of(engine).num_graphs == 1
    old = weakref.ref(runner.model)
    runner.replace_model(runner_of(other).model)
    assert graphs_of(engine).num_graphs == 0
    gc.collect()
    assert old() is None, "no recording may keep the old weights"
    again = full("b", random_prompt(9, seed=1), max_tokens=12)
    assert Answers.of(drain(engine, [again]))["b"].logprobs == expected["a"].logprobs
    assert graphs_of(engine).num_graphs == 1


def test_an_unloaded_model_leaves_nothing_behind(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    one(engine, submit("a", [5, 6, 7], max_tokens=10))
    assert graphs_of(engine).num_graphs == 1
    model: weakref.ref[Model] = weakref.ref(runner_of(engine).model)
    graphs = weakref.ref(graphs_of(engine))
    engine.close()
    del engine
    gc.collect()
    assert model() is None
    assert graphs() is None


def test_a_library_that_appears_while_a_model_serves_is_recorded_then(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = load_engine(checkpoint)
    with computing_with(TORCH), caplog.at_level(logging.INFO):
        one(engine, submit("a", [5, 6, 7], max_tokens=10))
    assert graphs_of(engine).num_graphs == 0
    one(engine, submit("b", [5, 6, 8], max_tokens=WANTED_TIMES + 1))
    assert graphs_of(engine).num_graphs == 1
    assert not [record for record in caplog.records if "cannot be recorded" in record.message]

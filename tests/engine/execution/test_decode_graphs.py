"""Decode steps through recorded graphs, padded to a few sizes, give the same tokens. On a GPU the real recorder is used, on a CPU a fake one."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.step import StepInput
from pilotlight.engine.execution.context import Context
from pilotlight.engine.execution.decode_graphs import (
    AGAIN,
    WANTED_TIMES,
    CudaRecorder,
    DecodeGraphs,
    GraphShape,
    Outputs,
    Recorder,
)
from pilotlight.engine.execution.runner import ModelRunner
from pilotlight.engine.execution.state_places import state_groups
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk
from tests.cpu_kernels import skip_where_lengths_are_read_on_the_host
from tests.engine.driver import drain, load_engine, random_prompt, submit
from tests.engine.fake_drafter import Remembering
from tests.engine.families import FURTHER_RECORDED, write_family


class Replayed:
    def __init__(self, forward: Callable[[], Outputs]) -> None:
        self._forward = forward
        self.output = tuple(
            torch.full_like(output, torch.nan) for output in forward()
        )  # only a replay fills in results

    def replay(self) -> None:
        for output, computed in zip(self.output, self._forward(), strict=True):
            output.copy_(computed)


class StandIn:
    def takes(self, rows: int) -> bool:
        return True

    def record(self, forward: Callable[[], Outputs]) -> Replayed:
        return Replayed(forward)


class Unable(StandIn):
    def record(self, forward: Callable[[], Outputs]) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing")


class OfOneRow(StandIn):
    def takes(self, rows: int) -> bool:
        return rows == 1

    def record(self, forward: Callable[[], Outputs]) -> Replayed:
        recorded = super().record(forward)
        assert len(recorded.output[0]) == 1
        return recorded


def with_graphs(engine: Engine, recorder: Recorder) -> DecodeGraphs:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    layers = runner.layout.views(runner.kv_cache)
    graphs = runner.graphs = DecodeGraphs(
        lambda batch: (runner.model.forward(Context(batch, layers)),),
        runner.layout.block_size,
        recorder,
        runner.kv_cache.device,
        state_groups(layers),
    )
    return graphs


def tokens(engine: Engine, count: int = 5) -> dict[str, list[int]]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 4}]
    requests = [
        submit(f"{i}", random_prompt(7 + 9 * i, seed=i), max_tokens=20 + 6 * i, **kinds[i % 2]) for i in range(count)
    ]
    return {name: heard.token_ids for name, heard in drain(engine, requests).items()}


@pytest.mark.parametrize("depth", [1, 2])
def test_padded_and_replayed_steps_choose_the_same_tokens(checkpoint: Path, depth: int) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint, depth=depth)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    assert tokens(engine) == expected
    assert graphs.num_graphs >= 2, "batches shrink as sequences end, so several sizes are recorded"


class Uneven(Remembering):
    """A drafter whose number of drafts depends on the length of the prompt."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return super().propose(sequence, most)[: sequence.num_prompt_tokens % 4]


@pytest.fixture(params=[name for name in FURTHER_RECORDED if name.startswith(("lfm2", "qwen3.5"))])
def with_states(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    write_family(tmp_path, request.param)
    return tmp_path


@pytest.mark.parametrize("depth", [1, 2])
def test_a_state_advances_once_in_recorded_and_replayed_steps(with_states: Path, depth: int) -> None:
    expected = tokens(load_engine(with_states))
    engine = load_engine(with_states, depth=depth)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    assert tokens(engine) == expected
    assert graphs.num_graphs == 5, "one to five sequences, and nothing is padded"


@pytest.mark.parametrize("kind", [Remembering, Uneven])
def test_drafts_of_a_model_with_states_are_recorded_where_they_are_as_many_for_all(
    with_states: Path, kind: type[Remembering]
) -> None:
    skip_where_lengths_are_read_on_the_host()
    requests = [submit(f"{i}", random_prompt(8 + 5 * i, seed=i), max_tokens=40) for i in range(3)]
    alone = drain(load_engine(with_states), requests)
    engine = load_engine(with_states)
    answers = {one.prompt_token_ids: alone[one.sequence_id].token_ids for one in requests}
    engine.scheduler.speculation = kind(answers, num_drafts=3)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    together = drain(engine, requests)
    assert {name: heard.token_ids for name, heard in together.items()} == {
        name: heard.token_ids for name, heard in alone.items()
    }
    assert any(shape.sequences == 3 and shape.longest == 4 for shape in graphs.recorded) == (kind is Remembering)


@pytest.mark.parametrize("depth", [1, 2])
def test_padded_steps_that_check_drafts_choose_the_same_tokens(checkpoint: Path, depth: int) -> None:
    """Three sequences are padded to four. Sequences with different numbers of drafts are computed as separate rows."""
    skip_where_lengths_are_read_on_the_host()
    requests = [submit(f"{i}", random_prompt(7 + 9 * i, seed=i), max_tokens=40) for i in range(3)]
    alone = drain(load_engine(checkpoint), requests)
    answers = {one.prompt_token_ids: alone[one.sequence_id].token_ids for one in requests}
    engine = load_engine(checkpoint, depth=depth)
    engine.scheduler.speculation = Remembering(answers, num_drafts=3)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    together = drain(engine, requests)
    assert {name: heard.token_ids for name, heard in together.items()} == {
        name: heard.token_ids for name, heard in alone.items()
    }
    assert any(shape.sequences == 4 and shape.longest == 4 for shape in graphs.recorded)


@pytest.mark.parametrize("depth", [1, 2])
def test_drafts_of_different_numbers_are_recorded_and_choose_the_same_tokens(checkpoint: Path, depth: int) -> None:
    skip_where_lengths_are_read_on_the_host()
    requests = [submit(f"{i}", random_prompt(8 + 5 * i, seed=i), max_tokens=40) for i in range(4)]
    alone = drain(load_engine(checkpoint), requests)
    answers = {one.prompt_token_ids: alone[one.sequence_id].token_ids for one in requests}
    engine = load_engine(checkpoint, depth=depth)
    engine.scheduler.speculation = Uneven(answers, num_drafts=3)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    together = drain(engine, requests)
    assert {name: heard.token_ids for name, heard in together.items()} == {
        name: heard.token_ids for name, heard in alone.items()
    }
    assert any(shape.longest == 1 and shape.rows >= 8 for shape in graphs.recorded), "four sequences, six drafts"


def drafted(*lengths: int, context: int = 8) -> StepInput:
    chunks = []
    for row, length in enumerate(lengths):
        sequence = Sequence("", [row] * context, SamplingParams(9), b"", num_computed_tokens=context - 1)
        sequence.tables = [BlockTable(range(row * 4096, row * 4096 + context // 4 + 4))]
        chunks.append(Chunk.next_of(sequence, 1, tuple(range(length - 1))))
    return step_of(chunks, 4)


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [((4, 4), (2, 8, 4)), ((4, 3), (8, 8, 1)), ((4, 1), (8, 8, 1)), ((4, 4, 4, 4, 4, 4, 4, 3), (32, 32, 1))],
)
def test_drafts_of_one_number_keep_together_and_others_are_rows(
    lengths: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    found = GraphShape.of(drafted(*lengths), pads=True)
    assert found is not None
    assert found[:3] == shape
    padded = found.pad(drafted(*lengths))
    assert len(padded.token_ids) == found.rows
    assert padded.checks_drafts is (found.longest > 1)


def test_drafts_of_different_numbers_behind_long_contexts_are_not_recorded() -> None:
    assert GraphShape.of(drafted(4, 3, context=4 * 8000), pads=True) is None


def test_a_size_is_recorded_when_it_has_been_wanted_a_few_times(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, StandIn())
    drain(engine, [submit("a", [5, 6, 7], max_tokens=WANTED_TIMES)])
    assert graphs.num_graphs == 0, "the first token comes from the prompt's step, which is no decode"
    drain(engine, [submit("b", [5, 6, 8], max_tokens=2)])
    assert graphs.num_graphs == 1


def test_sizes_that_cannot_be_recorded_are_not_tried_and_cost_the_others_nothing(checkpoint: Path) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, OfOneRow())
    assert tokens(engine) == expected
    assert graphs.num_graphs == 1, "only the size of one row can be recorded"


def test_a_model_that_cannot_be_recorded_runs_without(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, Unable())
    with caplog.at_level(logging.INFO):
        assert tokens(engine) == expected
    assert graphs.num_graphs == 0
    assert len([r.message for r in caplog.records if "cannot be recorded" in r.message]) == 1, "it is logged once"


def decodes(rows: int, blocks: int = 1) -> StepInput:
    chunks = []
    for row in range(rows):
        sequence = Sequence("", [rows] * 4 * blocks, SamplingParams(1), b"", num_computed_tokens=4 * blocks - 1)
        sequence.tables = [BlockTable(range(row * blocks, (row + 1) * blocks))]
        chunks.append(Chunk.next_of(sequence, 1))
    return step_of(chunks, 4)


def graphs_of_doubles(recorder: Recorder, most: int = 48) -> DecodeGraphs:
    return DecodeGraphs(lambda batch: (batch.token_ids * 2.0,), 4, recorder, torch.device("cpu"), pads=False, most=most)


def replayed(graphs: DecodeGraphs, rows: int) -> bool:
    ready = graphs.ready(decodes(rows))
    assert ready is None or ready.compute()[0].tolist() == [2 * rows] * rows
    return ready is not None


def test_a_size_that_comes_late_takes_the_place_of_the_one_unused_for_longest() -> None:
    graphs = graphs_of_doubles(StandIn(), most=2)
    for rows in (1, 2):
        assert [replayed(graphs, rows) for _ in range(WANTED_TIMES)] == [False] * (WANTED_TIMES - 1) + [True]
    assert replayed(graphs, 1)
    assert sum(replayed(graphs, 3) for _ in range(1000)) == 1000 - WANTED_TIMES + 1
    assert graphs.num_graphs == 2
    assert replayed(graphs, 1)
    assert not replayed(graphs, 2)


def test_sizes_that_push_each_other_out_are_recorded_ever_more_rarely() -> None:
    graphs = graphs_of_doubles(recorder := Counting(), most=2)
    for _ in range(1000):
        for rows in (1, 2, 3):
            replayed(graphs, rows)
    assert recorder.times <= 12


class Counting(StandIn):
    """A recorder whose first `failures` recordings of `rows` rows fail, as for lack of memory; it counts recordings."""

    def __init__(self, rows: int = 0, failures: int = 0) -> None:
        self.rows, self.failures, self.times = rows, failures, 0

    def record(self, forward: Callable[[], Outputs]) -> Replayed:
        self.times += 1
        recorded = super().record(forward)
        if len(recorded.output[0]) == self.rows and self.failures:
            self.failures -= 1
            raise torch.OutOfMemoryError("out of memory")
        return recorded


def test_a_size_that_failed_is_tried_again_and_the_others_never_notice() -> None:
    graphs = graphs_of_doubles(Counting(rows=2, failures=1))
    for _ in range(WANTED_TIMES):
        assert not replayed(graphs, 2)
    assert any(replayed(graphs, 1) for _ in range(WANTED_TIMES))
    assert sum(replayed(graphs, 2) for _ in range(1000)) == 1000 - (AGAIN - 1) * WANTED_TIMES + 1


def test_a_size_that_always_fails_is_tried_a_few_times_and_it_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs = graphs_of_doubles(recorder := Counting(rows=2, failures=10**6))
    with caplog.at_level(logging.INFO):
        assert not any(replayed(graphs, 2) for _ in range(3000))
    assert recorder.times == 4, "recordings are tried at the 4th, 32nd, 256th and 2,048th use"
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("rows", "padded"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 24), (64, 64), (100, 104)]
)
def test_sizes_are_few(rows: int, padded: int) -> None:
    assert GraphShape.of(decodes(rows, blocks=35), pads=True) == (padded, padded, 1, 64, None, False)


def test_recordings_and_those_that_failed_are_counted_whatever_replaces_them(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    with_graphs(engine, Unable())
    drain(engine, [submit("a", [5, 6, 7], max_tokens=WANTED_TIMES + 2)])
    assert (engine.load().num_graphs, engine.load().graph_failures) == (0, 1)
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.replace_model(engine.runner.model)
    with_graphs(engine, StandIn())
    drain(engine, [submit("b", [5, 6, 7], max_tokens=WANTED_TIMES + 2)])
    assert (engine.load().num_graphs, engine.load().graph_failures) == (1, 1)

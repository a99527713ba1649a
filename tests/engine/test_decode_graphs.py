"""Decode steps through recorded graphs: padded to a few sizes, and the same tokens. A stand-in records on a CPU; on a GPU the real recorder does."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import DecodeBatch
from engine.decode_graphs import WANTED_TIMES, CudaRecorder, DecodeGraphs, GraphShape, Outputs, Recorder
from engine.engine import Engine
from engine.runner import ModelRunner
from tests.checkpoints import write_llama
from tests.engine.driver import drain, load_engine, random_prompt, submit


class Replayed:
    def __init__(self, forward: Callable[[], Outputs]) -> None:
        self._forward = forward
        self.output = tuple(torch.full_like(output, torch.nan) for output in forward())  # only a replay may fill it

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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_llama(directory)
    return directory


def with_graphs(engine: Engine, recorder: Recorder) -> DecodeGraphs:
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    graphs = runner.graphs = DecodeGraphs(
        lambda batch: (runner.model.forward(batch, runner._layers),), runner.block_size, recorder
    )
    return graphs


def tokens(engine: Engine, count: int = 5) -> dict[str, list[int]]:
    kinds: list[dict[str, Any]] = [{}, {"temperature": 0.9, "seed": 4}]
    requests = [
        submit(f"{i}", random_prompt(7 + 9 * i, seed=i), max_tokens=20 + 6 * i, **kinds[i % 2]) for i in range(count)
    ]
    return {name: heard.token_ids for name, heard in drain(engine, requests).items()}


@pytest.mark.parametrize("overlaps", [False, True])
def test_padded_and_replayed_steps_choose_the_same_tokens(checkpoint: Path, overlaps: bool) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint, overlaps=overlaps)
    graphs = with_graphs(engine, CudaRecorder() if torch.cuda.is_available() else StandIn())
    assert tokens(engine) == expected
    assert graphs.num_graphs >= 2, "as sequences end, batches shrink: more than one size is wanted"


def test_a_size_is_recorded_when_it_has_been_wanted_a_few_times(checkpoint: Path) -> None:
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, StandIn())
    drain(engine, [submit("a", [5, 6, 7], max_tokens=WANTED_TIMES)])
    assert graphs.num_graphs == 0, "the first token is the prompt's"
    drain(engine, [submit("b", [5, 6, 8], max_tokens=2)])
    assert graphs.num_graphs == 1


def test_sizes_that_cannot_be_recorded_are_not_tried_and_cost_the_others_nothing(checkpoint: Path) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, OfOneRow())
    assert tokens(engine) == expected
    assert graphs.num_graphs == 1, "the last sequence's"


def test_a_model_that_cannot_be_recorded_goes_on_without(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = tokens(load_engine(checkpoint))
    engine = load_engine(checkpoint)
    graphs = with_graphs(engine, Unable())
    with caplog.at_level(logging.INFO):
        assert tokens(engine) == expected
    assert graphs.num_graphs == 0
    assert len([r.message for r in caplog.records if "cannot be recorded" in r.message]) == 1, "it is said once"


@pytest.mark.parametrize(
    ("rows", "padded"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 24), (64, 64), (100, 104)]
)
def test_sizes_are_few(rows: int, padded: int) -> None:
    decode = DecodeBatch(torch.zeros(rows, 5, dtype=torch.int64), torch.ones(rows, dtype=torch.int64), 80)
    assert GraphShape.of(decode) == (padded, 8)

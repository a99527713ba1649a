"""Trace files in Mooncake's format: requests share prefixes exactly if they share blocks."""

import lzma
from pathlib import Path

import msgspec
import pytest

from load_tests.sim.cities import load_cities
from load_tests.sim.mooncake import BLOCK_TOKENS, Line, TraceFile
from load_tests.sim.run import prepare
from load_tests.sim.traces import matched
from pilotlight.edge_router.routing.cost import CostPolicy

LINES = [
    Line(0, 1300, 10, (0, 1, 2)),
    Line(1000, 2000, 20, (0, 1, 2, 3)),  # continues the first conversation
    Line(2000, 1100, 30, (0, 1, 9)),  # differs from both after block 1
    Line(3000, 700, 5, (0, 7)),
    Line(4000, 300, 5, (8,)),
]


def test_prompts_share_as_many_tokens_as_their_blocks() -> None:
    prompts = TraceFile(LINES).prompts
    for i, prompt in enumerate(prompts):
        assert prompt[-1].tokens == LINES[i].input_length
        for j, other in enumerate(prompts):
            same = 0
            for a, b in zip(LINES[i].hash_ids, LINES[j].hash_ids, strict=False):
                if a != b:
                    break
                same += 1
            shared = matched(prompt, {prefix.digest for prefix in other})
            assert shared == min(same * BLOCK_TOKENS, LINES[i].input_length)


def test_a_chain_has_a_digest_only_where_prompts_end_or_part() -> None:
    assert [len(prompt) for prompt in TraceFile(LINES).prompts] == [3, 4, 3, 2, 1]
    long = Line(0, 51_200, 1, tuple(range(100)))
    assert len(TraceFile([long]).prompts[0]) == 1


def test_times_are_stretched_to_the_rate_and_a_conversation_stays_in_its_city() -> None:
    sessions = TraceFile(LINES).sessions(load_cities(), rate=0.5, requests=5, seed=1)
    assert [session.starts_at for session in sessions] == [0.0, 2.5, 5.0, 7.5, 10.0]
    assert (
        len({session.city for session in sessions[:3]}) == 1
    )  # these share block 1, not only block 0, which nearly all share


def test_a_file_is_read_packed_or_not_and_one_of_another_format_is_refused(tmp_path: Path) -> None:
    raw = b"\n".join(msgspec.json.encode(line) for line in LINES)
    (tmp_path / "plain.jsonl").write_bytes(raw)
    (tmp_path / "packed.jsonl.xz").write_bytes(lzma.compress(raw))
    assert TraceFile.read(tmp_path / "plain.jsonl").prompts == TraceFile.read(tmp_path / "packed.jsonl.xz").prompts
    (tmp_path / "other.jsonl").write_text('{"prompt": "hello"}\n')
    with pytest.raises(msgspec.ValidationError, match="timestamp"):
        TraceFile.read(tmp_path / "other.jsonl")
    with pytest.raises(ValueError, match="no request"):
        TraceFile([])


def test_a_file_is_simulated_to_its_end() -> None:
    lines = [Line(100.0 * i, 3000 + 10 * i, 50, (0, i // 4, 1000 + i)) for i in range(300)]
    simulation = prepare(CostPolicy, TraceFile(lines), "heavy", 300, 11)
    simulation.run()
    assert simulation.started == simulation.answered + simulation.shed
    assert simulation.started > 250

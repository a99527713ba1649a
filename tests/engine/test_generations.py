"""Generations of blocks: if a held block is handed out again by mistake, its first holder ends before a step uses the block. No other sequence
ends."""

from array import array

import pytest

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.requirements import stale
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.pool.block_table import BlockTable
from tests.engine.core.test_engine import PROMPT
from tests.engine.driver import Heard, drain, one, submit
from tests.engine.fake_runner import expected_tokens, fake_engine


def holding(blocks: list[int], generations: list[int]) -> Sequence:
    sequence = Sequence("s", [1], SamplingParams(1), b"")
    sequence.tables = [BlockTable(blocks, generations)]
    return sequence


def test_the_sequences_whose_blocks_moved_on_are_named() -> None:
    current = array("q", [5, 6, 7, 8])
    sequences = [holding([0, 1], [5, 6]), holding([], []), holding([1, 3, 2], [6, 8, 7]), holding([3], [8])]
    assert stale(current, sequences) == []
    current[3] += 1
    assert stale(current, sequences) == [2, 3]
    current[3] -= 1
    assert stale(current, sequences) == []
    assert stale(array("q"), [holding([], [])]) == []


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_damaged_generation_ends_one_sequence_and_the_others_step_continues(
    place: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine, runner = fake_engine()
    for name, prompt in (("a", PROMPT), ("b", [*PROMPT, 1, 2, 3]), ("c", [9, *PROMPT])):
        engine.submit(submit(name, prompt, max_tokens=6))
    engine.step()
    engine.step()
    steps = len(runner.batch_tokens)
    block = next(s for s in engine.scheduler.running if s.sequence_id == "b").tables[0].blocks[place]
    engine.scheduler.pool.generations[block] += 1
    engine.step()
    assert runner.batch_tokens[steps:] == [2], "only the sequences without damage are computed"
    heard = drain(engine, [])
    assert heard["b"].finish_reason == "error"
    assert "handed to another" in (heard["b"].error or "")
    assert len(heard["b"].token_ids) == 2
    assert heard["a"].token_ids == expected_tokens(PROMPT, 6)
    assert heard["c"].token_ids == expected_tokens([9, *PROMPT], 6)
    assert "sequence b" in caplog.text


def test_a_block_handed_out_twice_stays_with_its_new_holder() -> None:
    engine, _ = fake_engine(num_blocks=8)
    heard: dict[str, Heard] = {}
    engine.submit(submit("old", PROMPT, max_tokens=9))
    engine.step()
    pool = engine.scheduler.pool
    stolen = engine.scheduler.running[0].tables[0].blocks[0]
    pool.forget([stolen])
    pool.recount(stolen, 0)  # the fault: the block counts as free, but `old` holds it
    engine.submit(submit("new", [7, *PROMPT], max_tokens=9))
    assert stolen == 0, "it is the lowest free block, which is handed out next"
    while engine.has_work:
        engine.step()
        for output in engine.sequences.take_outputs():
            heard.setdefault(output.sequence_id, Heard()).hear(output)
        pool.assert_consistent()
    assert (heard["old"].finish_reason, heard["new"].finish_reason) == ("error", "length")
    assert heard["new"].token_ids == expected_tokens([7, *PROMPT], 9)
    assert pool.num_held == 0
    assert one(engine, submit("again", PROMPT, max_tokens=9)).token_ids == expected_tokens(PROMPT, 9)


def test_only_a_sequences_unshared_blocks_are_discarded() -> None:
    """Discarded blocks are overwritten, so those that another sequence also holds must be kept."""
    engine, _ = fake_engine()
    engine.submit(submit("a", PROMPT, max_tokens=9))
    engine.step()
    engine.step()
    engine.submit(submit("b", [*PROMPT, 1, 2, 3], max_tokens=9))
    engine.step()
    held = {s.sequence_id: set(s.tables[0].blocks) for s in engine.scheduler.running}
    assert held["a"] & held["b"], "both must hold a common prefix"
    first = next(s for s in engine.scheduler.running if s.sequence_id == "a")
    assert set(engine.scheduler.discard(first)) == held["a"] - held["b"] != set()


def test_a_generation_rises_whenever_a_block_is_handed_out_or_leaves() -> None:
    engine, _ = fake_engine(num_blocks=2)
    pool = engine.scheduler.pool
    first = pool.allocate()
    assert first is not None
    seen = [pool.generations[first]]
    pool.release([first])
    assert pool.allocate() == first
    seen.append(pool.generations[first])
    pool.release([first])
    pool.remove_blocks([first])
    seen.append(pool.generations[first])
    pool.add_blocks([first])
    assert pool.allocate() == first
    seen.append(pool.generations[first])
    assert seen == sorted(set(seen))
    pool.register(first, b"x")
    pool.release([first])
    pool.hold([pool.find(b"x", -1)])
    assert pool.generations[first] == seen[-1], "a sequence that finds a block joins its holders"

"""The blocks whose recurrent states a step reads and writes, by sequence."""

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.execution.state_places import StatePlaces
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk

BLOCK_SIZE = 4
NONE = -1


def chunk(start: int, end: int, table: list[int], drafts: tuple[int, ...] = ()) -> Chunk:
    """Return a chunk of a sequence of `end` tokens."""
    sequence = Sequence("s", list(range(end)), SamplingParams(max_tokens=9), b"", num_computed_tokens=start)
    sequence.tables = [BlockTable(table)]
    return Chunk(sequence, start, end, True, drafts=drafts)


def places(*chunks: Chunk) -> StatePlaces:
    step = step_of(chunks, BLOCK_SIZE)
    return StatePlaces.of(step, step.groups[0], BLOCK_SIZE)


def numbers(found: StatePlaces) -> tuple[list[int], list[int], list[int], list[int]]:
    before, first_runs, ends, after, _ = found
    return before.tolist(), first_runs.tolist(), ends.tolist(), after.tolist()


def test_a_decode_reads_the_block_of_the_token_before_it_and_writes_its_own() -> None:
    inside, behind = chunk(6, 7, [10, 11]), chunk(8, 9, [20, 21, 22])
    assert numbers(places(inside, behind)) == ([11, 21], [0, 1, 2], [1, 2], [11, 22])


def test_a_prompt_writes_each_of_its_blocks_and_begins_without_a_state() -> None:
    found = places(chunk(0, 10, [5, 6, 7]), chunk(8, 13, [1, 2, 3, 4]))
    assert numbers(found) == ([NONE, 2], [0, 3, 5], [4, 8, 10, 14, 15], [5, 6, 7, 3, 4])
    assert found.of_sequences == ((4, 8, 10), (14, 15))


def test_the_state_after_each_draft_has_a_block() -> None:
    found = places(chunk(7, 8, [10, 11, 12, 13], drafts=(1, 2)), chunk(4, 5, [20, 21]))
    assert numbers(found) == ([11, 20], [0, 3, 4], [1, 2, 3, 4], [11, 12, 13, 21])

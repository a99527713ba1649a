"""A step that is divided among ranks: each rank gets its chunks with its own blocks, and the shares together are the step."""

from array import array
from collections.abc import Iterator
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.protocol import SamplingParams
from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.core.step import ImageInput, StepInput
from pilotlight.engine.core.step_shares import StepShares
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk

BLOCK_SIZE = 4
SAMPLING = SamplingParams(max_tokens=9)


class JournalHeader(NamedTuple):
    rank: int
    num_tokens: int
    start: int  # position of the chunk's first token
    length: int
    adapter: int
    is_fed: bool


asked = st.builds(
    JournalHeader,
    rank=st.integers(0, 2),
    num_tokens=st.integers(1, 12),
    start=st.integers(0, 11),
    length=st.integers(1, 12),
    adapter=st.sampled_from([-1, -1, 2]),
    is_fed=st.booleans(),
)


def asked_step(sequences: list[JournalHeader]) -> StepInput:
    """Return a step over two groups of layers, with decodes before prompts."""
    chunks, row_of = [], {}
    blocks = {rank: iter(range(rank, 600, 3)) for rank in range(3)}
    for i, one in enumerate(sequences):
        tokens = [100 * i + place for place in range(one.num_tokens)]
        start = min(one.start, one.num_tokens - 1)
        if one.is_fed and start == one.num_tokens - 1 and start:
            tokens[-1] = PENDING
        sequence = Sequence(str(i), tokens, SAMPLING, b"", num_computed_tokens=start, adapter_slot=one.adapter)
        row_of[sequence] = i
        sequence.tables = [BlockTable(taken(blocks[one.rank], one.num_tokens)) for _ in range(2)]
        chunks.append(Chunk.next_of(sequence, min(one.length, one.num_tokens - start)))
    return step_of(sorted(chunks, key=lambda chunk: not chunk.is_decode), BLOCK_SIZE, row_of)


def taken(blocks: Iterator[int], num_tokens: int) -> list[int]:
    return [next(blocks) for _ in range(-(-num_tokens // BLOCK_SIZE))]


@given(st.lists(asked, min_size=1, max_size=8), st.booleans())
@settings(deadline=None)
def test_shares_are_the_step_in_the_blocks_of_each_rank(sequences: list[JournalHeader], every_row: bool) -> None:
    step = asked_step(sequences)
    shares = StepShares(step, 3, BLOCK_SIZE, every_row)
    found, wanted = [], []
    for rank in range(3):
        own = shares.of(rank)
        if own is None:
            assert shares.wanted_of(rank) == []
            continue
        assert own.num_decodes == sum(
            length == 1 and context > 1 for length, context in zip(own.lengths, own.context_lens, strict=True)
        )
        fed = dict(own.feeds)
        for place, token in enumerate(own.token_ids):
            slots = tuple(
                [
                    (slot // BLOCK_SIZE * 3 + rank) * BLOCK_SIZE + slot % BLOCK_SIZE
                    for slot in [g.slots[place] for g in own.groups]
                ]
            )
            adapter = -1 if own.adapter_slots is None else own.adapter_slots[place]
            found.append((slots, own.positions[place], token, adapter, fed.get(place)))
        for number, group in enumerate(own.groups):
            tables = [[block * 3 + rank for block in table] for table in group.tables]
            assert all(table in [list(row) for row in step.groups[number].tables] for table in tables)
        wanted += [(own.positions[place], own.token_ids[place]) for place in shares.wanted_of(rank)]
    fed = dict(step.feeds)
    whole = [
        (
            tuple([group.slots[i] for group in step.groups]),
            step.positions[i],
            token,
            -1 if step.adapter_slots is None else step.adapter_slots[i],
            fed.get(i),
        )
        for i, token in enumerate(step.token_ids)
    ]
    assert sorted(found, key=str) == sorted(whole, key=str)
    rows = range(len(step.token_ids)) if every_row or step.logit_rows is None else step.logit_rows
    assert [wanted[i] for i in shares.order] == [(step.positions[row], step.token_ids[row]) for row in rows]
    assert sum(shares.num_wanted) == len(rows)


def test_an_image_goes_to_the_rank_of_its_tokens() -> None:
    step = asked_step([JournalHeader(0, 6, 0, 6, -1, False), JournalHeader(1, 8, 0, 8, -1, False)])
    image = ImageInput(b"name", 3, array("q", [8, 9, 10]))
    ahead = array("q", [0, 1, 2, 3, 4, 5, 0, 1, 4, 4, 4, 5, 6, 7])
    shares = StepShares(step._replace(images=(image,), last_visible=ahead), 3, BLOCK_SIZE, every_row=False)
    first, second = shares.of(0), shares.of(1)
    assert first is not None
    assert second is not None
    assert first.images == ()
    assert second.images == (ImageInput(b"name", 3, array("q", [2, 3, 4])),)
    assert (first.last_visible, second.last_visible) == (None, ahead[6:])
    assert shares.of(2) is None

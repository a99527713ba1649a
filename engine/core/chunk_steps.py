"""Converts chunks of sequences to the input of a step (step.py)."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate

from pilotlight.engine.api.protocol import Pooling
from pilotlight.engine.core.sequence import PENDING, Sequence
from pilotlight.engine.core.step import (
    GREEDY,
    BlockTables,
    ChoiceRow,
    GroupInput,
    ImageInput,
    PoolingInput,
    PromptLogprobsInput,
    StepInput,
    greedy_rows,
)
from pilotlight.engine.images.prompt import last_visible, rotary_positions
from pilotlight.engine.kv.pool.block_table import BlockTable
from pilotlight.engine.scheduling.plan import Chunk

# minimum width of a decode's block table: a smaller one would need one more recorded step and save nothing
_FEW_BLOCKS = 32


def step_of(
    chunks: SequenceOf[Chunk],
    block_size: int,
    row_of: Mapping[Sequence, int] | None = None,
    started_texts: frozenset[int] = frozenset(),
) -> StepInput:
    """Return the step that computes `chunks`.

    `row_of`: for each sequence, the row of the previous step that chooses its newest token.
    """
    num_decodes = len(chunks)
    while num_decodes and not chunks[num_decodes - 1].is_decode:
        num_decodes -= 1
    checks_drafts = any([chunk.num_tokens > 1 for chunk in chunks[:num_decodes]])
    num_single = 0 if checks_drafts else num_decodes
    single, longer = chunks[:num_single], chunks[num_single:]
    token_ids = array("q", [chunk.sequence.token_ids[chunk.start] for chunk in single])
    for chunk in longer:
        token_ids.extend(chunk.sequence.token_ids[chunk.start : chunk.end])
        token_ids.extend(chunk.drafts)
    lengths = (*[1] * num_single, *[chunk.num_tokens for chunk in longer])
    new = [(i, chunk) for i, chunk in enumerate(chunks) if not chunk.sequence.started]
    return StepInput(
        num_decodes,
        checks_drafts,
        lengths,
        context_lens=tuple([chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]),
        token_ids=token_ids,
        positions=_positions(single, longer),
        groups=tuple(
            [
                _group(group, chunks, num_decodes, num_single, block_size)
                for group in range(len(chunks[0].sequence.tables))
            ]
        ),
        logit_rows=_logit_rows(chunks),
        feeds=_feeds(chunks, lengths, token_ids, row_of),
        prompt_logprobs=_prompt_logprobs(new, lengths),
        pooling=_pooling(new),
        started_texts=started_texts,
        adapter_slots=_adapter_slots(chunks, lengths),
        images=_images(chunks, lengths),
        token_types=_token_types(chunks),
        last_visible=_last_visible(chunks),
    )


def guessed_step(chunks: SequenceOf[Chunk], token_ids: SequenceOf[int], block_size: int) -> StepInput:
    """Return a step that computes `token_ids`, one token per chunk, at the chunks' starts."""
    num = len(chunks)
    groups = [_group(group, chunks, num, num, block_size) for group in range(len(chunks[0].sequence.tables))]
    return StepInput(
        num,
        checks_drafts=False,
        lengths=(1,) * num,
        context_lens=tuple([chunk.end for chunk in chunks]),
        token_ids=array("q", token_ids),
        positions=_positions(chunks, ()),
        groups=tuple(groups),
        logit_rows=None,
    )


def scratch_step(
    token_ids: list[int],
    start: int,
    block_size: int,
    num_groups: int = 1,
    pooling: Pooling | None = None,
    copies: int = 1,
) -> tuple[StepInput, list[ChoiceRow]]:
    """Return a step that computes the tokens from `start` on, and its rows, which choose tokens greedily.

    There are no rows if the text is pooled. The step overwrites the cache's first blocks. `copies`: number of ranks that compute the tokens, each in
    its own blocks.
    """
    num_blocks = -(-len(token_ids) // block_size)
    chunks = []
    for copy in range(copies):
        sequence = Sequence("", token_ids, GREEDY, b"", pooling=pooling, num_computed_tokens=start)
        firsts = range(copy, copies * num_groups, copies)
        sequence.tables = [BlockTable(first + i * copies * num_groups for i in range(num_blocks)) for first in firsts]
        chunks.append(Chunk.next_of(sequence, len(token_ids) - start))
    step = step_of(chunks, block_size)
    return step, [] if pooling else greedy_rows(step)


def _positions(single: SequenceOf[Chunk], longer: SequenceOf[Chunk]) -> "array[int]":
    """Return the rotary positions of chunks of one token, then of longer ones."""
    positions = array("q", [chunk.start for chunk in single])
    for i, chunk in enumerate(single):
        if images := chunk.sequence.images:
            positions[i] = rotary_positions(images, chunk.start, chunk.start + 1)[0]
    for chunk in longer:
        end, images = chunk.start + chunk.num_tokens, chunk.sequence.images
        positions.extend(rotary_positions(images, chunk.start, end) if images else range(chunk.start, end))
    return positions


def _group(group: int, chunks: SequenceOf[Chunk], num_decodes: int, num_single: int, block_size: int) -> GroupInput:
    tables = [chunk.sequence.tables[group].blocks for chunk in chunks]
    slots = array(
        "q",
        [
            table[(at := chunk.start) // block_size] * block_size + at % block_size
            for chunk, table in zip(chunks[:num_single], tables, strict=False)
        ],
    )
    for chunk, table in zip(chunks[num_single:], tables[num_single:], strict=True):
        at, end = chunk.start, chunk.start + chunk.num_tokens
        while at < end:  # per block: takes a fifth of the time of a loop per token
            first = table[at // block_size] * block_size + at % block_size
            length = min(end - at, block_size - at % block_size)
            slots.extend(range(first, first + length))
            at += length
    decodes, prompts = tables[:num_decodes], tables[num_decodes:]
    width = max(map(len, decodes), default=0)
    width = max(_FEW_BLOCKS, 1 << (width - 1).bit_length()) if width else 0
    return GroupInput(slots, _rows(decodes, width), _rows(prompts, max(map(len, prompts), default=0)))


def _rows(tables: "SequenceOf[array[int]]", width: int) -> BlockTables:
    blocks = array("q")
    for table in tables:
        blocks += table
        # pad with the table's own first block: its content is finite, and attention masks it
        if len(table) < width:
            blocks += table[:1] * (width - len(table))
    return BlockTables(blocks, width)


def _logit_rows(chunks: SequenceOf[Chunk]) -> "array[int] | None":
    if all([chunk.end - chunk.start == 1 and chunk.samples for chunk in chunks]):
        return None
    rows, end = array("q"), 0
    for chunk in chunks:
        end += chunk.num_tokens
        if chunk.samples:
            rows.extend(range(end - len(chunk.drafts) - 1, end))
    return rows


def _adapter_slots(chunks: SequenceOf[Chunk], lengths: SequenceOf[int]) -> "array[int] | None":
    slots = [chunk.sequence.adapter_slot for chunk in chunks]
    if max(slots) < 0:
        return None
    return array("q", [slot for slot, length in zip(slots, lengths, strict=True) for _ in range(length)])


def _token_types(chunks: SequenceOf[Chunk]) -> "array[int] | None":
    if not any([chunk.sequence.second_from for chunk in chunks]):
        return None
    types = array("q")
    for chunk in chunks:
        second = chunk.sequence.second_from or len(chunk.sequence.token_ids)
        types.extend([int(place >= second) for place in range(chunk.start, chunk.start + chunk.num_tokens)])
    return types


def _last_visible(chunks: SequenceOf[Chunk]) -> "array[int] | None":
    images = [(image, chunk) for chunk in chunks for image in chunk.sequence.images if image.is_bidirectional]
    if not any([image.start < chunk.end and chunk.start < image.end - 1 for image, chunk in images]):
        return None
    found = array("q")
    for chunk in chunks:
        found += last_visible(chunk.sequence.images, chunk.start, chunk.start + chunk.num_tokens)
    return found


def _feeds(
    chunks: SequenceOf[Chunk], lengths: SequenceOf[int], token_ids: "array[int]", row_of: Mapping[Sequence, int] | None
) -> tuple[tuple[int, int], ...]:
    if PENDING not in token_ids:
        return ()
    assert row_of is not None, "a token is pending, but no step chooses it"
    firsts = accumulate(lengths, initial=0)
    return tuple(
        [
            (first, row_of[chunk.sequence])
            for first, chunk in zip(firsts, chunks, strict=False)
            if token_ids[first] == PENDING
        ]
    )


def _prompt_logprobs(
    chunks: SequenceOf[tuple[int, Chunk]], lengths: SequenceOf[int]
) -> tuple[PromptLogprobsInput, ...]:
    wanted = []
    for i, chunk in chunks:
        sequence, sampling = chunk.sequence, chunk.sequence.sampling
        if sampling.prompt_logprobs and sequence.wants_prompt_logprobs:
            num_top = sampling.num_logprobs if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs
            first = max(chunk.start + 1, sampling.prompt_logprobs_from)
            if known := sequence.token_ids[first : min(chunk.end + 1, sequence.num_prompt_tokens)]:
                row = sum(lengths[:i]) + first - 1 - chunk.start
                wanted.append(PromptLogprobsInput(i, row, array("q", known), num_top or 0))
    return tuple(wanted)


def _pooling(chunks: SequenceOf[tuple[int, Chunk]]) -> tuple[PoolingInput, ...]:
    return tuple(
        [
            PoolingInput(
                i, s.pooling, s.arrival.number, chunk.start == 0, chunk.end == len(s.token_ids), len(s.token_ids)
            )
            for i, chunk in chunks
            if (s := chunk.sequence).pooling is not None
        ]
    )


def _images(chunks: SequenceOf[Chunk], lengths: SequenceOf[int]) -> tuple[ImageInput, ...]:
    found = []
    if any([chunk.sequence.images for chunk in chunks]):
        for chunk, row in zip(chunks, accumulate(lengths, initial=0), strict=False):
            for image in chunk.sequence.images:
                first, places = image.between(chunk.start, chunk.end)
                if places:
                    rows = array("q", [row + place - chunk.start for place in places])
                    found.append(ImageInput(image.name, first, rows, image.columns))
    return tuple(found)

"""Padding of steps to common shapes by computing some tokens twice, so that few recordings suffice.

Whole decodes are repeated; drafts that differ in number become decodes of one token each. For prompts, the last tokens of the longest chunk are
computed once more, as separate sequences: each attends to the same tokens as its original, and writes the same values to the same place.
decode_graphs.py makes the recordings.
"""

from array import array
from itertools import accumulate
from typing import NamedTuple

from pilotlight.engine.core.step import BlockTables, GroupInput, StepInput

# Limit of prompt tokens, including padding: launching the layers of an 8B model one by one takes 18 ms, in which an H100 computes some 700 tokens.
MOST_TOKENS = 640
_LARGEST_STEP = 128  # largest difference between two sizes: with many tokens, time is proportional to their number
_MOST_PROMPTS = 4
_FEW_BLOCKS = 32


class PromptShape(NamedTuple):
    """The padded size of a step's prompts."""

    chunks: int
    tokens: int
    width: int  # blocks per table

    @classmethod
    def of(cls, step: StepInput) -> "PromptShape | None":
        """Return the shape; None if the step is too large, checks drafts, or needs more than logits."""
        lengths = step.lengths[step.num_decodes :]
        num_tokens = sum(lengths)
        if step.checks_drafts or step.prompt_logprobs or step.pooling or len(lengths) > _MOST_PROMPTS:
            return None
        is_whole = _padded_tokens(num_tokens) == num_tokens and power_of_two(len(lengths)) == len(lengths)
        chunks = len(lengths) if is_whole else power_of_two(2 * len(lengths) + 1)
        again = chunks - len(lengths)  # number of added chunks, each of at least one token
        tokens = _padded_tokens(num_tokens + again)
        if tokens > MOST_TOKENS or tokens - num_tokens > again * max(lengths):
            return None
        widths = (group.prompts.width for group in step.groups)
        return cls(chunks, tokens, power_of_two(max(_FEW_BLOCKS, *widths)))


def padded(step: StepInput, num_decodes: int, shape: PromptShape) -> StepInput:
    """Return the step padded to `num_decodes` decodes and to a shape of prompts."""
    decodes, more = step.num_decodes, num_decodes - step.num_decodes
    lengths, contexts = step.lengths[decodes:], step.context_lens[decodes:]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    end = list(accumulate(lengths, initial=decodes))[longest + 1]
    again = _divided(shape.tokens - sum(lengths), shape.chunks - len(lengths))

    def tokens(numbers: "array[int]") -> "array[int]":
        made = numbers[:decodes] + numbers[:1] * more + numbers[decodes:]
        for count in again:
            made += numbers[end - count : end]
        return made

    def group(given: GroupInput) -> GroupInput:
        blocks, width = given.decodes
        prompts = _widened(given.prompts, shape.width)
        prompts += prompts[longest * shape.width : (longest + 1) * shape.width] * len(again)
        return given._replace(
            slots=tokens(given.slots),
            decodes=BlockTables(blocks + blocks[:width] * more, width),
            prompts=BlockTables(prompts, shape.width),
        )

    rows = range(len(step.token_ids)) if step.logit_rows is None else step.logit_rows
    feeds = step.feeds
    if feeds and feeds[0][0] == 0:
        feeds += tuple([(decodes + i, feeds[0][1]) for i in range(more)])
    return step._replace(
        num_decodes=num_decodes,
        lengths=(1,) * num_decodes + lengths + again,
        context_lens=step.context_lens[:decodes]
        + step.context_lens[:1] * more
        + contexts
        + (contexts[longest],) * len(again),
        token_ids=tokens(step.token_ids),
        positions=tokens(step.positions),
        groups=tuple([group(given) for given in step.groups]),
        adapter_slots=step.adapter_slots and tokens(step.adapter_slots),
        logit_rows=array("q", [row if row < decodes else row + more for row in rows]),
        feeds=feeds,
    )


def one_by_one(step: StepInput) -> StepInput:
    """Return a step of decodes in which each token is a separate decode.

    Every layer writes all keys and values of the step before any token reads them, so drafts that differ in number become rows like any others.
    """
    lengths = step.lengths
    contexts = [
        end - count + i + 1 for end, count in zip(step.context_lens, lengths, strict=True) for i in range(count)
    ]

    def group(given: GroupInput) -> GroupInput:
        blocks = array("q")
        for table, count in zip(given.decodes.rows, lengths, strict=True):
            blocks += table * count
        return given._replace(decodes=BlockTables(blocks, given.decodes.width))

    return step._replace(
        num_decodes=len(contexts),
        checks_drafts=False,
        lengths=(1,) * len(contexts),
        context_lens=tuple(contexts),
        groups=tuple([group(given) for given in step.groups]),
    )


def _widened(tables: BlockTables, width: int) -> "array[int]":
    blocks = array("q")
    for start in range(0, len(tables.blocks), tables.width):
        blocks += tables.blocks[start : start + tables.width] + tables.blocks[start : start + 1] * (
            width - tables.width
        )
    return blocks


def _divided(number: int, parts: int) -> tuple[int, ...]:
    return tuple([number // parts + (i < number % parts) for i in range(parts)])


def _padded_tokens(number: int) -> int:
    return min(power_of_two(number), -(-number // _LARGEST_STEP) * _LARGEST_STEP)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least the number."""
    return 1 << (number - 1).bit_length()

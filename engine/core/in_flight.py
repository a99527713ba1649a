"""The steps of a model that are launched on its runner and not collected yet.

Converts chunks to a runner's input, and its output to results of chunks. This module is independent of how tokens are used.
"""

from array import array
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from pilotlight.engine.core.chunk_steps import step_of
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.step import ChoiceRow, RunResult, SampledToken
from pilotlight.engine.core.step_runner import Launched, Runner
from pilotlight.engine.scheduling.plan import Chunk


class ForwardedStep(NamedTuple):
    """A step whose tokens are not chosen yet."""

    chunks: SequenceOf[Chunk]
    num_decodes: int  # number of chunks of decodes, which come before those of prompts
    forwarded: Any


class CollectedStep(NamedTuple):
    chunks: SequenceOf[Chunk]
    num_decodes: int
    # per chunk, the tokens chosen after its own tokens and after each of its drafts; empty in the middle of a prompt
    tokens: list[list[SampledToken]]
    result: RunResult
    busy_s: float  # seconds in which the device worked on this step alone

    @property
    def num_tokens(self) -> int:
        """Return the number of computed tokens, including drafts."""
        return sum([chunk.num_tokens for chunk in self.chunks])

    @property
    def num_drafts(self) -> int:
        return sum([len(chunk.drafts) for chunk in self.chunks])

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of prompt tokens, except those that are computed like a decode."""
        return sum([chunk.end - chunk.start for chunk in self.chunks[self.num_decodes :]])


class InFlightSteps:
    def __init__(self, runner: Runner, block_size: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._block_size = block_size
        self._clock = clock
        self._steps: deque[_Step] = deque()  # the oldest first
        self._device_free_at = 0.0  # the clock's time when the newest step was collected

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks of all steps that have not been collected."""
        return [chunk for step in self._steps for chunk in step.forwarded.chunks]

    @property
    def is_full(self) -> bool:
        """True if the oldest step must be collected before another step chooses its tokens."""
        return len(self._steps) + 1 >= self._runner.depth

    @property
    def feeds_next(self) -> bool:
        """True if the tokens that a step chooses can be input of the next step before the host knows them."""
        return self._runner.depth == 2

    def forward(self, chunks: SequenceOf[Chunk], started_texts: frozenset[int]) -> ForwardedStep:
        """Start the forward pass of a step."""
        row_of = self._steps[-1].row_of() if self._steps and self.feeds_next else None
        step = step_of(chunks, self._block_size, row_of, started_texts)
        return ForwardedStep(chunks, step.num_decodes, self._runner.forward(step))

    def choose(
        self, step: ForwardedStep, masks: Mapping[Sequence, SequenceOf["array[int]"]] = MappingProxyType({})
    ) -> None:
        """Start the choice of tokens for each chunk that is still current.

        The host must know all tokens of the previous step. `masks`: for each sequence that is restricted to some tokens, one bit mask per row.
        """
        rows: list[ChoiceRow] = []
        num_rows: list[int] = []
        first = 0  # row of the chunk's first logits
        for chunk in step.chunks:
            before = len(rows)
            if chunk.samples:
                sequence, drafts = chunk.sequence, chunk.drafts
                if chunk.epoch == sequence.epoch:
                    if drafts or sequence.counts is not None or sequence in masks:
                        rows += _rows(chunk, first, masks.get(sequence))
                    else:
                        rows.append(ChoiceRow(first, chunk.end, sequence.sampling))
                first += 1 + len(drafts)
            num_rows.append(len(rows) - before)
        self._steps.append(_Step(step, num_rows, self._runner.choose(step.forwarded, rows)))

    def collect(self) -> CollectedStep:
        """Wait for the oldest step, and return its results."""
        step = self._steps.popleft()
        result = step.launched.collect()
        now = self._clock()
        # If steps overlap, count only the time since the previous one ended, so that the sum never exceeds the elapsed time.
        busy_s = min(result.device_s, now - self._device_free_at)
        self._device_free_at = now
        ends = accumulate(step.num_rows)
        tokens = [result.tokens[end - n : end] for n, end in zip(step.num_rows, ends, strict=True)]
        return CollectedStep(*step.forwarded[:2], tokens, result, busy_s)

    def drop(self) -> None:
        """Drop all steps without their results."""
        self._steps.clear()

    def wait(self) -> None:
        """Wait for all steps, and drop their results."""
        while self._steps:
            self._steps.popleft().launched.collect()


class _Step(NamedTuple):
    forwarded: ForwardedStep
    num_rows: list[int]  # per chunk, number of rows that choose a token
    launched: Launched

    def row_of(self) -> dict[Sequence, int]:
        """Map each sequence to the row that chooses its next token."""
        ends = accumulate(self.num_rows)
        chosen = zip(self.forwarded.chunks, self.num_rows, ends, strict=True)
        return {chunk.sequence: end - count for chunk, count, end in chosen if count}


def _rows(chunk: Chunk, first: int, masks: SequenceOf["array[int]"] | None) -> list[ChoiceRow]:
    """Return a chunk's rows. Each chooses as if the drafts before it had been chosen."""
    sequence, drafts, end = chunk.sequence, chunk.drafts, chunk.end
    counts = sequence.counts
    if counts is not None:
        counts.catch_up(sequence.token_ids, end)
    return [
        ChoiceRow(
            first + i,
            end + i,
            sequence.sampling,
            None if counts is None else counts.followed_by(drafts[:i]),
            None if masks is None else masks[i],
        )
        for i in range(1 + len(drafts))
    ]

"""A step being planned: which tokens of which sequences it computes, within which limits.

scheduler.py chooses the sequences and their blocks; this module uses only lengths.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from pilotlight.engine.api.protocol import DraftCounts
from pilotlight.engine.api.struct import Struct
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.images.prompt import uncut_end
from pilotlight.engine.kv.pool.groups import CacheGroups, Windows


class SchedulerLimits(NamedTuple):
    block_size: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_waiting: int
    max_decode_delay_s: float = math.inf  # limit of the delay that a step's prompt tokens cause for its decodes
    windows: Windows = (None,)
    stages: int = 1  # stages of a pipeline: as many steps are in flight, each with a part of the decodes
    copies: int = 1  # copies of the attention: number of ranks with separate sequences and blocks
    # True if some layers have a recurrent state. It changes in place, so after a failed step tokens are computed again from the end of a block.
    has_states: bool = False
    # True for an encoder: each prompt is computed in one step, because all of its tokens attend to each other, and nothing is cached.
    whole_prompts: bool = False
    most_unmeasured: float = math.inf  # limit of a step's prompt tokens while the model's speed is unknown
    most_image_tokens: int = 0  # most tokens of an image that one step must compute; 0 if steps may divide images
    # True if output tokens are computed again, after a preemption or a move, by the kernels that computed them, a few in each step. So they have the
    # same bits as before. No other tokens are computed by these kernels.
    replays: bool = False

    @property
    def groups(self) -> CacheGroups:
        return CacheGroups(self.block_size, max(self.max_num_batched_tokens, self.most_image_tokens), self.windows)


class Chunk(Struct, frozen=True, gc=False):
    """Tokens [start, end) of one sequence, computed in one step, and the drafts after them."""

    sequence: Sequence
    start: int
    end: int  # drafts excluded
    samples: bool  # True if its last logits choose the next token
    epoch: int = 0  # the sequence's epoch when planned; results of an earlier epoch are dropped
    drafts: tuple[int, ...] = ()  # guesses of the next tokens; those that equal the chosen tokens are accepted

    @classmethod
    def next_of(cls, sequence: Sequence, length: int, drafts: tuple[int, ...] = ()) -> "Chunk":
        start = sequence.num_computed_tokens
        end = start + length
        samples = end == len(sequence.token_ids) and sequence.pooling is None
        return cls(sequence, start, end, samples, sequence.epoch, drafts)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.drafts)

    @property
    def is_decode(self) -> bool:
        """True if kernels of decodes compute it, and only then may it have drafts.

        These are single tokens after computed ones, or all output tokens if those are replayed.
        """
        if self.sequence.replays:
            return self.start >= self.sequence.first_output
        return self.end - self.start == 1 and self.start > 0

    @property
    def is_current(self) -> bool:
        """True if its sequence has not ended, been preempted or been rewound since the chunk was planned.

        After a preemption or rewind the sequence computes these tokens again.
        """
        return self.epoch == self.sequence.epoch


class StepCount(NamedTuple):
    """The size of a step, its tokens and its duration."""

    num_rows: int  # including drafts
    num_drafts: int
    num_decodes: int
    num_tokens: int  # tokens that the step published
    step_s: float


class Speculation(Protocol):
    """The source of a model's drafts: engine/drafting, or a fake in tests.

    Drafts do not change the output: only tokens that would be chosen without them are accepted.
    """

    counts: DraftCounts

    def drafts(self, plan: "StepPlan") -> Mapping[Sequence, tuple[int, ...]]:
        """Guess the next tokens of the plan's decoding sequences, whose newest token may be PENDING.

        Stay within the plan's budget, and within `most_drafts` per sequence.
        """

    def note(self, chunk: Chunk, num_accepted: int) -> None:
        """Count how many of a chunk's drafts were right."""

    def count_step(self, step: "StepCount") -> None:
        """Record a step's size and duration."""

    def forget(self, sequence: Sequence) -> None:
        """Forget a sequence that has ended or moved to another engine."""


def most_drafts(sequence: Sequence) -> int:
    """Return how many drafts a decoding sequence may have within its length limit."""
    return sequence.length_limit - len(sequence.token_ids) - 1


# Number of rows that matrix products compute together, so that 66 tokens take as long as 80 (Zen 4, a 0.5 B model in bf16, one thread: 64 tokens take
# 315 ms, 66 take 389, 80 take 395).
ROW_TILE = 16


class StepPlan:
    """The chunks chosen so far for a step, and the rest of its budget of tokens."""

    def __init__(self, budget: int, reserve: Callable[[Sequence, int], bool] = lambda sequence, end: True) -> None:
        """`reserve`: gives a sequence blocks for a number of tokens; returns False if too few are free."""
        self.budget = budget
        self.reserve = reserve
        self._lengths: dict[Sequence, int] = {}
        self._excess: dict[Sequence, int] = {}  # tokens of an image beyond the budget, of one sequence at most
        self._drafts: dict[Sequence, tuple[int, ...]] = {}

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._lengths

    @property
    def chunks(self) -> list[Chunk]:
        """Return the chunks, decodes before prompts."""
        decodes: list[Chunk] = []
        prompts: list[Chunk] = []
        for sequence, length in self._lengths.items():
            chunk = Chunk.next_of(sequence, length, self._drafts.get(sequence, ()))
            (decodes if chunk.is_decode else prompts).append(chunk)
        return decodes + prompts

    @property
    def decoding(self) -> list[Sequence]:
        """Return the sequences that compute only their newest token, and choose the next one."""
        return [sequence for sequence in self._lengths if sequence.is_decoding and sequence.pooling is None]

    @property
    def is_empty(self) -> bool:
        return not self._lengths

    @property
    def num_rows(self) -> int:
        """Return the number of planned tokens, without drafts."""
        return sum(self._lengths.values())

    def room_for(self, sequence: Sequence, start: int, length: int) -> int:
        """Return how many tokens from `start` on a sequence can have if it should have `length`.

        They end within no image whose tokens attend to each other. An image at the beginning of a chunk may exceed `length`, once in a step.
        """
        end = uncut_end(sequence.images, start, start + length)
        return 0 if end > start + length and (self._excess or sequence in self._lengths) else end - start

    def length_of(self, sequence: Sequence) -> int:
        return self._lengths.get(sequence, 0)

    def limit(self, num_tokens: float) -> None:
        """Limit the budget, rounded down so that the step has whole tiles of rows, if a tile is left."""
        self.budget = int(min(self.budget, num_tokens))
        in_whole_tiles = self.budget - (self.num_rows + self.budget) % ROW_TILE
        self.budget = in_whole_tiles if in_whole_tiles >= ROW_TILE else self.budget

    def add(self, sequence: Sequence, length: int, within: float = math.inf) -> None:
        """Plan `length` more tokens of a sequence. More than `within` do not count as part of the budget."""
        self._lengths[sequence] = self._lengths.get(sequence, 0) + length
        self.budget -= int(min(length, within))
        if length > within:
            self._excess[sequence] = length - int(within)

    def drop(self, sequence: Sequence) -> None:
        """Remove a sequence from the plan."""
        self.budget += self._lengths.pop(sequence, 0) - self._excess.pop(sequence, 0)

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Plan to check drafts after a decoding sequence's newest token."""
        self._drafts[sequence] = drafts
        self.budget -= len(drafts)

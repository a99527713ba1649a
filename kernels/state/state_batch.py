"""The sequences of a step for layers with a recurrent state: their tokens, and places of their states.

A sequence's tokens are computed in *runs*. The first run starts from a state in a block of the cache, every later run from the state after the
previous run; the state after each run is written to a block, or dropped. This module knows tokens and blocks, and is independent of what a state
contains.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from pilotlight.kernels.checks import ArgumentCheck

NO_BLOCK = (
    -1
)  # in place of a block: a sequence without earlier state starts from zero, and a state after a run is dropped

# A function that computes some tokens of a sequence, or one token of each of several sequences: (tokens, states before) -> (outputs, states after).
Advance = Callable[[slice, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class StateBatch(NamedTuple):
    before: torch.Tensor  # [sequences] int64: the block of the state at the sequence's first token, or NO_BLOCK
    # [sequences + 1] int64: the index of each sequence's first run; the last entry is the number of runs
    first_runs: torch.Tensor
    ends: torch.Tensor  # [runs] int64: the index of the token after the last token of each run
    # [runs] int64: the block to which the state after each run is written, or NO_BLOCK for all runs of a sequence
    after: torch.Tensor
    host_ends: tuple[tuple[int, ...], ...]  # `ends` of each sequence's runs, on the host

    @property
    def num_alone(self) -> int:
        """The number of sequences at the beginning of the batch that have one token each."""
        return next((i for i, ends in enumerate(self.host_ends) if ends != (i + 1,)), len(self.host_ends))

    @property
    def num_stepwise(self) -> int:
        """The number of sequences at the beginning whose runs have one token each: decodes, and their drafts."""
        start = 0
        for i, ends in enumerate(self.host_ends):
            if ends != tuple(range(start + 1, start + len(ends) + 1)):
                return i
            start = ends[-1]
        return len(self.host_ends)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence."""
        ends = [0, *(runs[-1] for runs in self.host_ends)]
        return max((end - start for start, end in pairwise(ends)), default=0)

    def require(self, check: ArgumentCheck, tokens: int, num_blocks: int) -> None:
        """Refuse parts that do not match each other, and in debug mode blocks that do not exist."""
        integers = (torch.int64,)
        check.derive("sequences", len(self.host_ends), "batch.host_ends")
        check.derive("sequences+1", len(self.host_ends) + 1, "batch.host_ends")
        check.derive("runs", sum(map(len, self.host_ends)), "batch.host_ends")
        check.tensor("batch.before", self.before, "sequences", integers, dense=1)
        check.tensor("batch.first_runs", self.first_runs, "sequences+1", integers, dense=1)
        check.tensor("batch.ends", self.ends, "runs", integers, dense=1)
        check.tensor("batch.after", self.after, "runs", integers, dense=1)
        end = self.host_ends[-1][-1] if self.host_ends else 0
        check.require("batch.host_ends", end == tokens, f"ends with {end}, and there are {tokens} tokens")
        check.indices("batch.before", self.before, num_blocks, "the existing blocks, or -1", NO_BLOCK)
        check.indices("batch.after", self.after, num_blocks, "the existing blocks, or -1", NO_BLOCK)

    def compute(self, states: torch.Tensor, at_once: Advance, run: Advance) -> torch.Tensor:
        """Compute all tokens with torch, update `states` [blocks, ...] and return the outputs.

        `at_once` computes one token of each of several sequences, with a state for each; `run` computes the tokens of one run, with one state.
        """
        outputs, alone = [], self.num_alone
        if alone:
            output, state = at_once(slice(alone), _states_of(states, self.before[:alone]))
            _keep(states, self.after[:alone], state)
            outputs.append(output)
        start = number = alone
        for sequence in range(alone, len(self.host_ends)):
            (state,) = _states_of(states, self.before[sequence : sequence + 1])
            left = []
            for end in self.host_ends[sequence]:
                output, state = run(slice(start, end), state)
                outputs.append(output)
                left.append(state)
                start = end
            _keep(states, self.after[number : number + len(left)], torch.stack(left))
            number += len(left)
        if not outputs:
            return at_once(slice(0), states[:0])[0]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _states_of(states: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return copies of the states in `blocks`, zero for NO_BLOCK."""
    there = (blocks >= 0).view(-1, *(1,) * (states.dim() - 1))
    return torch.where(there, states[blocks.clamp(min=0)], 0)


def _keep(states: torch.Tensor, blocks: torch.Tensor, new: torch.Tensor) -> None:
    """Write each state of `new` to its block, except those for NO_BLOCK."""
    if not blocks.is_meta:
        kept = blocks >= 0
        blocks, new = blocks[kept], new[kept]
    states[blocks] = new

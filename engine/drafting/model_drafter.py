"""Drafts of a model: one token at a time for all sequences, with their seeds and penalties.

The drafter's keys and values are in the sequences' blocks (engine/models/draft_layers.py), so no state is kept here.
"""

import time
from collections.abc import Sequence as SequenceOf

from pilotlight.engine.core.chunk_steps import guessed_step
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.step import ChoiceRow
from pilotlight.engine.core.step_runner import Runner
from pilotlight.engine.drafting.costs import StepCosts
from pilotlight.engine.drafting.drafter import DrafterError, known_tokens
from pilotlight.engine.scheduling.plan import Chunk


class ModelDrafter:
    def __init__(self, name: str, prior: float, runner: Runner, block_size: int) -> None:
        """`prior`: acceptance rate that is assumed until drafts were verified.

        `runner` runs the drafter with the model's blocks.
        """
        self.name = name
        self.prior = prior
        self._runner = runner
        self._block_size = block_size
        self._costs = StepCosts()  # by number of sequences, the time to guess one token for each

    def predict_s(self, num_sequences: int) -> float:
        """Predict the time to guess one token for each sequence; 0 before any measurement."""
        return self._costs.predict_s(num_sequences) if self._costs.is_known else 0.0

    def propose(self, sequences: SequenceOf[Sequence], length: int) -> list[list[int]]:
        """Guess `length` tokens after each sequence's known tokens.

        Each sequence needs blocks for all guesses but the last. Raises DrafterError, or any error of the runner.
        """
        began = time.perf_counter()
        starts = [known_tokens(sequence) - 1 for sequence in sequences]
        newest = [sequence.token_ids[start] for sequence, start in zip(sequences, starts, strict=True)]
        guesses: list[list[int]] = [[] for _ in sequences]
        for i in range(length):
            chunks = [Chunk(one, start + i, start + i + 1, True) for one, start in zip(sequences, starts, strict=True)]
            rows = [
                _row(number, chunk, guessed)
                for number, (chunk, guessed) in enumerate(zip(chunks, guesses, strict=True))
            ]
            forwarded = self._runner.forward(guessed_step(chunks, newest, self._block_size))
            tokens = self._runner.choose(forwarded, rows).collect().tokens
            if not all([token.is_finite for token in tokens]):
                raise DrafterError("its logits are not finite")
            newest = [token.token_id for token in tokens]
            for guessed, token_id in zip(guesses, newest, strict=True):
                guessed.append(token_id)
        self._costs.count(len(sequences), (time.perf_counter() - began) / length)
        return guesses


def _row(number: int, chunk: Chunk, guessed: SequenceOf[int]) -> ChoiceRow:
    sequence, counts = chunk.sequence, chunk.sequence.counts
    if counts is None:
        return ChoiceRow(number, chunk.end, sequence.sampling)
    counts.catch_up(sequence.token_ids, known_tokens(sequence))
    return ChoiceRow(number, chunk.end, sequence.sampling, counts.followed_by(guessed))

"""Drafts by a model: guesses token after token, of all sequences at once, each drawn as the sequence's own are, with its seed and its penalties.

What it draws by lies in the sequences' blocks (engine/models/draft_layers.py), so that nothing is kept here of a sequence.
"""

import time
from collections.abc import Sequence as SequenceOf

from pilotlight.engine.core.chunk_steps import guessed_step
from pilotlight.engine.core.in_flight import Runner
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.core.step import ChoiceRow
from pilotlight.engine.drafting.costs import StepCosts
from pilotlight.engine.drafting.drafter import DrafterError, known_tokens
from pilotlight.engine.scheduling.plan import Chunk


class ModelDrafter:
    def __init__(self, name: str, prior: float, runner: Runner, block_size: int) -> None:
        """`prior`: how often a guess is right, before any was checked. `runner`: of the drafter, over the blocks of the model that it drafts for."""
        self.name = name
        self.prior = prior
        self._runner = runner
        self._block_size = block_size
        self._costs = StepCosts()  # of a token of each sequence

    def predict_s(self, num_sequences: int) -> float:
        """Predict what a token of each of so many sequences takes: nothing, before any was measured."""
        return self._costs.predict_s(num_sequences) if self._costs.is_known else 0.0

    def propose(self, sequences: SequenceOf[Sequence], length: int) -> list[list[int]]:
        """Guess `length` tokens behind each one's known ones. They hold blocks for all but the last. Raises DrafterError, or whatever breaks."""
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

"""Fake speculation whose drafts are right, wrong, or partly right, as a seed decides."""

from collections.abc import Sequence as SequenceOf
from random import Random

from pilotlight.engine.api.protocol import DraftCounts
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.plan import Chunk, StepCount, StepPlan, most_drafts
from tests.engine.fake_runner import VOCAB, next_penalised_token, next_token


class EachAlone:
    """A speculator that proposes for each sequence independently, as many drafts as fit into the step."""

    counts = DraftCounts()

    def drafts(self, plan: StepPlan) -> dict[Sequence, tuple[int, ...]]:
        proposed, budget = {}, plan.budget
        for sequence in plan.decoding:
            most = min(most_drafts(sequence), budget)
            proposed[sequence] = tuple(self.propose(sequence, most))[:most] if most > 0 else ()
            budget -= len(proposed[sequence])
        return proposed

    def propose(self, sequence: Sequence, most: int) -> SequenceOf[int]:
        raise NotImplementedError

    def note(self, chunk: Chunk, num_accepted: int) -> None:
        self.counts = self.counts.with_chunk(len(chunk.drafts), num_accepted)

    def count_step(self, step: StepCount) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        pass


class FakeDrafter(EachAlone):
    def __init__(self, seed: int, most: int = 6) -> None:
        self.draw = Random(seed)
        self.most = most

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        assert most > 0
        num_drafts, num_right = self.sizes(most)
        tokens = sequence.token_ids[:-1] if sequence.is_pending else list(sequence.token_ids)
        behind = len(sequence.token_ids)
        while len(tokens) < behind + num_drafts:
            is_right = len(tokens) < behind + num_right
            tokens.append((self._next(sequence, tokens) + (0 if is_right else 1)) % VOCAB)
        return tokens[behind:]

    def sizes(self, most: int) -> tuple[int, int]:
        """Return a random number of drafts to propose, and how many of them shall be right."""
        num_drafts = self.draw.randint(0, min(self.most, most))
        return num_drafts, self.draw.choice([0, num_drafts, self.draw.randint(0, num_drafts)])

    def _next(self, sequence: Sequence, tokens: list[int]) -> int:
        if sequence.counts is None:
            return next_token(tokens)
        num_prompt = sequence.num_prompt_tokens - sequence.num_delivered_tokens
        return next_penalised_token(tokens[:num_prompt], tokens[num_prompt:])


class Remembering(EachAlone):
    """A drafter that knows the answer to each prompt; a random number of its drafts are right."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]], num_drafts: int | None = None) -> None:
        """Propose tokens of `answers`: `num_drafts` in each step, or a random number if None."""
        self.answers = answers
        self.num_drafts = num_drafts
        self.draw = Random(1)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        answer = self.answers[tuple(sequence.token_ids[: sequence.num_prompt_tokens])]
        num_drafts = self.draw.randint(0, 5) if self.num_drafts is None else self.num_drafts
        drafts = answer[len(sequence.token_ids) - sequence.num_prompt_tokens :][: min(most, num_drafts)]
        right = self.draw.randint(0, 5)
        return [token if i < right else (token + 1) % 431 for i, token in enumerate(drafts)]

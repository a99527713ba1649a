"""The engine that computes with a model's bootstrap program until the model itself is loaded.

It owns its blocks. A sequence that the program cannot compute, or that outgrows it, waits for the model's own engine, which takes over everything.
Does not know torch, files, or when the model is loaded.
"""

import math
from collections.abc import Callable

from pilotlight.engine.api.protocol import ModelInfo, Submit
from pilotlight.engine.api.step_journal import HeldSequences
from pilotlight.engine.bootstrap.bootstrap_runner import BootstrapRunner
from pilotlight.engine.bootstrap.sampler import can_compute
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.scheduling.plan import SchedulerLimits


class BootstrapEngine(Engine):
    def __init__(self, info: ModelInfo, runner: BootstrapRunner, limits: SchedulerLimits, most_tokens: int) -> None:
        """`most_tokens`: limit for one sequence that the program computes."""
        super().__init__(info, runner, limits, with_torch=False)
        self._most_tokens = most_tokens

    @property
    def has_answered(self) -> bool:
        return self.stats.output_tokens > 0

    def submit(self, submit: Submit) -> None:
        """Start the sequence if the program can compute it, else let it wait."""
        super().submit(submit)
        sequence = self.sequences.get(submit.sequence_id)
        num_prompt_tokens = len(submit.prompt_token_ids)
        fits = num_prompt_tokens + submit.sampling.max_tokens <= self._most_tokens
        can_begin = can_compute(submit) and (fits or num_prompt_tokens <= self._most_tokens // 2)
        if sequence is not None and not can_begin:
            self._hold(sequence)

    def step(self, note_held: Callable[[HeldSequences], None] = lambda held: None) -> bool:
        for sequence in [s for s in self.scheduler.running if len(s.token_ids) > self._most_tokens]:
            self._hold(sequence)
        return super().step(note_held)

    def _hold(self, sequence: Sequence) -> None:
        self.scheduler.defer(_AwaitedModel(sequence))


class _AwaitedModel:
    """The model, for which a sequence waits until another engine takes it over."""

    deadline = math.inf
    is_admitted = False
    is_done = False

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.num_tokens = len(sequence.token_ids)

    def cancel(self) -> None:
        pass

    def take(self) -> None:
        raise AssertionError("it never comes here")

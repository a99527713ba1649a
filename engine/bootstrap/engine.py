"""The engine of a model whose bootstrap program computes, until the model itself has been loaded.

Its blocks are its own. A sequence that the program cannot compute, or that has outgrown it, is held until the model's own engine takes everything
over. Refuses to know torch, files, and when the model is there.
"""

from engine.bootstrap.runner import BootstrapRunner
from engine.bootstrap.sampler import can_compute
from engine.engine import Engine, error_output
from engine.plan import SchedulerLimits
from engine.protocol import ErrorCode, ModelInfo, Submit, TokenOutput
from engine.sequence import Sequence


class BootstrapEngine(Engine):
    def __init__(self, info: ModelInfo, runner: BootstrapRunner, limits: SchedulerLimits, most_tokens: int) -> None:
        """`most_tokens`: of one sequence that the program computes."""
        super().__init__(info, runner, limits, with_torch=False)
        self._most_tokens = most_tokens
        self._held: dict[str, Submit] = {}  # not begun
        self._outgrown: list[Sequence] = []  # begun, and as long as they may be here

    @property
    def has_answered(self) -> bool:
        return self.load().output_tokens > 0

    def has(self, sequence_id: str) -> bool:
        return super().has(sequence_id) or sequence_id in self._held_ids()

    def submit(self, submit: Submit) -> None:
        """Begin the sequence if the program can compute it, else hold it."""
        num_prompt_tokens = len(submit.prompt_token_ids)
        fits = num_prompt_tokens + submit.sampling.max_tokens <= self._most_tokens
        if can_compute(submit) and (fits or num_prompt_tokens <= self._most_tokens // 2):
            super().submit(submit)
        else:
            self._held[submit.sequence_id] = submit

    def step(self) -> bool:
        self._outgrown += self.detach_sequences(self._most_tokens + 1)
        return super().step()

    def abort(self, sequence_id: str) -> None:
        if sequence_id not in self._held_ids():
            super().abort(sequence_id)
            return
        self._held.pop(sequence_id, None)
        self._outgrown = [sequence for sequence in self._outgrown if sequence.sequence_id != sequence_id]
        self._outputs.append(TokenOutput(sequence_id, finish_reason="abort"))

    def abort_all(self) -> None:
        super().abort_all()
        for sequence_id in self._held_ids():
            self.abort(sequence_id)

    def end_all(self, code: ErrorCode, message: str) -> None:
        super().end_all(code, message)
        self._outputs += [error_output(sequence_id, code, message) for sequence_id in self._held_ids()]
        self._held, self._outgrown = {}, []

    def hand_over_to(self, successor: Engine) -> list[TokenOutput]:
        successor.adopt_sequences(self._outgrown)
        outputs = super().hand_over_to(successor)
        for submit in self._held.values():
            successor.submit(submit)
        return outputs

    def _held_ids(self) -> list[str]:
        return [*(sequence.sequence_id for sequence in self._outgrown), *self._held]

"""The sequences that a model has accepted and that have not ended, and their unsent outputs.

Each sequence ends with exactly one output that has a finish reason, even if its step fails. This module is independent of steps.
"""

from collections.abc import Callable, Iterator

from pilotlight.engine.api.protocol import ErrorCode, TokenOutput
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.grammar.matcher import ConstraintError


class OpenSequences:
    def __init__(self, on_end: Callable[[Sequence], None]) -> None:
        """`on_end` releases what an ended sequence holds."""
        self._on_end = on_end
        self._open: dict[str, Sequence] = {}
        self._outputs: list[TokenOutput] = []

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._open

    def __iter__(self) -> Iterator[Sequence]:
        """Yield all sequences open now, in order of acceptance; they may end meanwhile."""
        return iter(list(self._open.values()))

    @property
    def has_outputs(self) -> bool:
        return bool(self._outputs)

    def get(self, sequence_id: str | None) -> Sequence | None:
        return None if sequence_id is None else self._open.get(sequence_id)

    def add(self, sequence: Sequence) -> None:
        self._open[sequence.sequence_id] = sequence

    def tell(self, output: TokenOutput) -> None:
        """Keep an output for the next `take_outputs`.

        An output with a finish reason ends its sequence.
        """
        self._outputs.append(output)
        if output.finish_reason and (sequence := self._open.get(output.sequence_id)) is not None:
            self.remove(sequence)

    def abort(self, sequence_id: str) -> None:
        """End a sequence now; do nothing if it has ended already."""
        if sequence_id in self._open:
            self.tell(TokenOutput(sequence_id, finish_reason="abort"))

    def abort_all(self) -> None:
        for sequence in self:
            self.abort(sequence.sequence_id)

    def fail(self, sequence: Sequence, code: ErrorCode, message: str) -> None:
        self.tell(error_output(sequence.sequence_id, code, message))

    def leave_grammar(self, sequence: Sequence, error: ConstraintError) -> None:
        """End a sequence whose grammar allows no next token; the grammar is part of the request."""
        self.fail(sequence, "invalid_request", f"the grammar allows no continuation of the answer: {error}")

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence without an output: it has ended, or another engine sends its outputs from now on."""
        del self._open[sequence.sequence_id]
        self._on_end(sequence)

    def end_all(self, code: ErrorCode, message: str) -> None:
        for sequence in self:
            self.fail(sequence, code, message)

    def abandon(self, code: ErrorCode, message: str) -> None:
        """End all sequences with an error, without releasing what they hold."""
        self._outputs += [error_output(sequence_id, code, message) for sequence_id in self._open]
        self._open.clear()

    def take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs


def error_output(sequence_id: str, code: ErrorCode, message: str) -> TokenOutput:
    return TokenOutput(sequence_id, finish_reason="error", error_code=code, error_message=message)

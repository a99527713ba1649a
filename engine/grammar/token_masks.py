"""The tokens that sequences may choose.

A mask allows what the grammar allows, and no token that would end an answer before its minimum length. This module knows a sequence's matcher and
lengths, ends a sequence that has nothing to choose, and is independent of logits.
"""

import math
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import CancelledError, Future

from pilotlight.engine.api.protocol import ModelInfo
from pilotlight.engine.core.open_sequences import OpenSequences
from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.grammar.constraints import COMPILE_S, Grammars
from pilotlight.engine.grammar.matcher import ConstraintError, Matcher, everything
from pilotlight.engine.scheduling.plan import Chunk


class TokenMasks:
    def __init__(self, info: ModelInfo, grammars: Grammars | None, sequences: OpenSequences) -> None:
        """`grammars`: the model's grammars. If None, sequences that request a grammar are refused."""
        self._sequences = sequences
        self._vocab_size = info.vocab_size
        self._eos_token_ids = info.eos_token_ids
        self._grammars = grammars

    def awaited(self, sequence: Sequence, clock: Callable[[], float]) -> "AwaitedGrammar | None":
        """Return the grammar that a sequence has to wait for, or None. `clock`: the scheduler's clock."""
        if sequence.constraint is None or sequence.matcher is not None or self._grammars is None:
            return None
        delivered = sequence.token_ids[sequence.first_output :]
        return AwaitedGrammar(
            sequence, self._grammars.compile(sequence.constraint, delivered, sequence.tenant), clock()
        )

    def enforceable(self, chunks: list[Chunk]) -> list[Chunk]:
        """End the sequences whose grammar cannot be enforced; return the chunks of the other sequences."""
        refused = [chunk.sequence for chunk in chunks if chunk.sequence.lacks_grammar]
        for sequence in refused:
            code, why = sequence.why_unconstrained or ("invalid_request", "this engine compiles no grammars")
            self._sequences.fail(sequence, code, why)
        return [chunk for chunk in chunks if chunk.sequence not in refused] if refused else chunks

    def of(self, chunks: list[Chunk]) -> "dict[Sequence, list[array[int]]]":
        """Return the masks of sequences that may not choose every token.

        A sequence has one mask after its newest token and one after each draft. A sequence that may choose no token ends.
        """
        masks = {}
        for chunk in [chunk for chunk in chunks if chunk.sequence.may_be_masked]:
            if chunk.samples and chunk.is_current:
                try:
                    found = self._of(chunk)
                except ConstraintError as error:
                    self._sequences.leave_grammar(chunk.sequence, error)
                else:
                    if found is not None:
                        masks[chunk.sequence] = found
        return masks

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()

    def _of(self, chunk: Chunk) -> "list[array[int]] | None":
        sequence = chunk.sequence
        num_short = sequence.min_length - chunk.end
        if sequence.matcher is None and num_short <= 0:
            return None
        masks = None if sequence.matcher is None else sequence.matcher.masks(chunk.drafts)
        masks = masks or everything(self._vocab_size, 1 + len(chunk.drafts))
        if num_short > 0:
            eos = () if sequence.sampling.ignore_eos else self._eos_token_ids
            for mask in masks[:num_short]:
                _forbid(mask, (*eos, *sequence.sampling.stop_token_ids))
        return masks


def _forbid(mask: "array[int]", token_ids: SequenceOf[int]) -> None:
    """Forbid tokens in a mask, in place, unless no token would be left.

    So an answer can end where its grammar allows nothing else.
    """
    words = array("i", mask)
    for token_id in token_ids:
        words[token_id // 32] &= ~(1 << token_id % 32) if token_id % 32 < 31 else 0x7FFFFFFF
    if any(words):
        mask[:] = words


class AwaitedGrammar:
    """A grammar that a sequence waits for while other sequences run (engine/scheduling/awaited.py)."""

    is_admitted = False

    def __init__(self, sequence: Sequence, matcher: "Future[Matcher]", now: float) -> None:
        self.sequence = sequence
        self.num_tokens = len(sequence.token_ids)
        self._matcher = matcher
        self._compiled_by = now + COMPILE_S

    @property
    def deadline(self) -> float:
        """Return the time limit for the matcher; infinity once it is there.

        The sequence may then still wait for an adapter's slot.
        """
        return math.inf if self.is_done else self._compiled_by

    @property
    def is_done(self) -> bool:
        return self._matcher.done()

    def cancel(self) -> None:
        self._matcher.cancel()

    def take(self) -> None:
        """Give the sequence its matcher, or the reason why there is none.

        A sequence with an optional grammar continues without it if it cannot be enforced, but not if it is late: whether an answer is constrained
        must not depend on load.
        """
        try:
            self.sequence.matcher = self._matcher.result(timeout=0)
        except (TimeoutError, CancelledError):
            why = f"the answer's grammar was not ready after {COMPILE_S:g} s, because others are compiled first; try again in a moment"
            self.sequence.why_unconstrained = "overloaded", why
        except Exception as error:  # any error of the library for one grammar ends only its sequence
            self.sequence.why_unconstrained = "invalid_request", str(error) or type(error).__name__
            if not self.sequence.lacks_grammar:
                self.sequence.constraint = None

"""Chooses the sequence that gives up its blocks for an older one or for another model.

No sequence is preempted for a younger one, whatever their priorities, so the oldest running one always advances, and an admission by ageing is not
lost to the next more urgent arrival. This module is independent of tokens.
"""

from pilotlight.engine.core.sequence import Sequence
from pilotlight.engine.kv.lending.lease import Oldest
from pilotlight.engine.kv.manager import BlockManager
from pilotlight.engine.scheduling.plan import StepPlan
from pilotlight.engine.scheduling.scheduler_counts import SchedulerCounts
from pilotlight.engine.scheduling.waiting import WaitingSequences


class Preemption:
    """Preempts sequences of a model: for an older one, or for other models (a SlabUser of lease.py)."""

    def __init__(
        self, running: list[Sequence], waiting: WaitingSequences, blocks: BlockManager, counts: SchedulerCounts
    ) -> None:
        """`running`: the sequences to choose from, ordered by arrival."""
        self._running = running
        self._waiting = waiting
        self._blocks = blocks
        self._counts = counts

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def is_alone(self) -> bool:
        """True if no other sequence has blocks in the share of the oldest one."""
        oldest = self._oldest()
        return oldest is None or all([one is oldest or one.share != oldest.share for one in self.holders()])

    def holders(self) -> list[Sequence]:
        """Return the sequences that have blocks: they run, or already have blocks while they wait."""
        return self._running + self._waiting.admitted

    def oldest(self) -> Oldest | None:
        sequence = self._oldest()
        if sequence is None:
            return None
        return Oldest(sequence.arrival, _blocks_of(sequence), self._blocks.num_missing(sequence))

    def preempt_youngest(self, keep_oldest: bool) -> bool:
        """Preempt the youngest running sequence for another model; return False if none may be preempted."""
        victim = self._running[-1] if self._running else None
        if victim is None or (keep_oldest and victim is self._oldest()):
            return False
        self.preempt(victim)
        return True

    def preempt_holders(self, blocks: range) -> None:
        """Preempt all sequences that hold any of these blocks, because the blocks leave the model."""
        for sequence in [s for s in self.holders() if any(block in blocks for block in _blocks_of(s))]:
            self.preempt(sequence)

    def preempt_for(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt the youngest unplanned running sequence of the same share.

        Returns False if only the sequence itself is left: all others are older or already planned.
        """
        of_share = (s for s in reversed(self._running) if s.share == sequence.share)
        victim = next((s for s in of_share if s not in plan), sequence)
        if victim is sequence:
            return False
        self.preempt(victim)
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a sequence's blocks. It keeps its tokens and is the next of its tenant to be admitted."""
        if not self._waiting.cancel_awaited(sequence):
            self._running.remove(sequence)
        self._counts.swaps += self._blocks.swap_out(sequence)
        self._blocks.release(sequence, self.holders)
        sequence.forget_computed()
        self._waiting.ready.add(sequence)
        self._counts.preemptions += 1

    def _oldest(self) -> Sequence | None:
        """Return the oldest sequence that has blocks, or the next waiting one if none has.

        A waiting sequence of another priority may be older, but can only start when blocks are released.
        """
        if holders := self.holders():
            return min(holders, key=lambda sequence: sequence.arrival)
        return self._waiting.ready.peek() if self._waiting.ready else None


def _blocks_of(sequence: Sequence) -> list[int]:
    return [block for table in sequence.tables for block in table.held]

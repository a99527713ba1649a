"""The interface between an engine and what computes its steps.

That is a model on this rank, a group of ranks, or a fake in tests.
"""

from collections.abc import Sequence as SequenceOf
from typing import Any, Protocol

from pilotlight.engine.core.step import ChoiceRow, RunResult, StepInput


class Launched(Protocol):
    """A launched step."""

    def collect(self) -> RunResult:
        """Wait until the step has ended, and return its results."""


class Runner(Protocol):
    """A model that computes steps: a ModelRunner, or a fake in tests."""

    # steps in flight at once: 1 if the runner computes on the host, 2 on a GPU, the number of stages in a pipeline
    depth: int

    @property
    def num_graphs(self) -> int:
        """Return the number of recorded step sizes."""

    @property
    def graph_failures(self) -> int:
        """Return the number of failed attempts to record a step."""

    def forward(self, step: StepInput) -> Any:
        """Start the forward pass of a step; it runs after the previous choice, whose tokens it may use.

        Returns the first argument of `choose`.
        """

    def choose(self, forwarded: Any, rows: SequenceOf[ChoiceRow]) -> Launched:
        """Start the choice of tokens from rows of the step's logits. `rows`: ascending, may be empty."""

    def scrub(self, blocks: SequenceOf[int]) -> None:
        """Zero these blocks."""

    def reset(self) -> None:
        """Zero all blocks."""

"""A small semantic change of one file, what it would break, and where the tests are that should notice."""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutant(NamedTuple):
    file: str
    old: str  # occurs once in the file
    new: str
    why: str  # what would go wrong

    def applied_to(self, source: str) -> str | None:
        """The changed text; None where the code has moved on and the old text is not there exactly once."""
        return source.replace(self.old, self.new) if source.count(self.old) == 1 else None

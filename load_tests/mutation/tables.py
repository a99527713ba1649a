"""All changes, in named sets."""

from load_tests.mutation.fresh import FRESH
from load_tests.mutation.later import LATER
from load_tests.mutation.mutant import Mutant
from load_tests.mutation.survivors import SURVIVORS

SETS: dict[str, tuple[Mutant, ...]] = {"survivors": SURVIVORS, "fresh": FRESH, "later": LATER}

"""All changes, in named sets."""

from load_tests.mutation.again import AGAIN
from load_tests.mutation.dangerous import DANGEROUS
from load_tests.mutation.dangerous_again import DANGEROUS_AGAIN
from load_tests.mutation.dangerous_finally import DANGEROUS_FINALLY
from load_tests.mutation.dangerous_once_more import DANGEROUS_ONCE_MORE
from load_tests.mutation.dangerous_redrawn import DANGEROUS_REDRAWN
from load_tests.mutation.fresh import FRESH
from load_tests.mutation.later import LATER
from load_tests.mutation.mutant import Mutant
from load_tests.mutation.survivors import SURVIVORS

SETS: dict[str, tuple[Mutant, ...]] = {
    "survivors": SURVIVORS,
    "fresh": FRESH,
    "later": LATER,
    "again": AGAIN,
    "dangerous": DANGEROUS,
    "dangerous-redrawn": DANGEROUS_REDRAWN,
    "dangerous-again": DANGEROUS_AGAIN,
    "dangerous-once-more": DANGEROUS_ONCE_MORE,
    "dangerous-finally": DANGEROUS_FINALLY,
}

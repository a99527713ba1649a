"""Tables as output: fitted to a terminal, elsewhere one line per row, for other programs."""

import sys

from rich.console import Console
from rich.table import Table

WIDE = 10_000  # columns of output that is piped; rich would wrap cells at 80


def print_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else WIDE).print(table)

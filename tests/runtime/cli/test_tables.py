"""Tables on terminals and in pipes."""

import pytest
from rich.table import Table

from pilotlight.runtime.cli.tables import print_table


def test_a_row_is_one_line_for_programs_that_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("name", "detail", box=None)
    table.add_row("a", "word " * 100 + "end")
    print_table(table)
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", *["word"] * 100, "end"]

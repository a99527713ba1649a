"""tests/README.md says what is so: its table is what pytest collects, and every file it names is there."""

import re

from tests.table import BEGIN, END, README, ROOT, render, replaced


def test_the_table_is_what_pytest_collects() -> None:
    text = README.read_text(encoding="utf-8")
    assert (text.count(BEGIN), text.count(END)) == (1, 1)
    assert text == replaced(text, render()), "the table is stale: run python -m tests.table"


def test_every_file_it_names_is_there() -> None:
    named = set(re.findall(r"`(tests/[\w/.]+?)`", README.read_text(encoding="utf-8")))
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []

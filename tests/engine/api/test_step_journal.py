"""The journal of a host's steps, which is read after the host's death: a partial record counts as none."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.engine.api.step_journal import NOTHING_HELD, HeldSequences, StepJournal, read_journal

DIES = """
import os, signal, sys
from pathlib import Path
from pilotlight.engine.api.step_journal import HeldSequences, StepJournal
StepJournal(Path(sys.argv[1])).note("tiny", HeldSequences(("a", "b"), ("c",)))
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_what_models_hold_is_read_together(tmp_path: Path) -> None:
    journal = StepJournal(tmp_path / "steps")
    assert read_journal(tmp_path / "steps") == NOTHING_HELD
    journal.note("tiny", HeldSequences(("a",), ("p",)))
    journal.note("large", HeldSequences(("b", "ü"), ()))
    assert read_journal(tmp_path / "steps") == HeldSequences(("a", "b", "ü"), ("p",))
    journal.note("tiny", NOTHING_HELD)
    assert read_journal(tmp_path / "steps") == HeldSequences(("b", "ü"), ())


def test_the_pages_of_the_journal_are_there_before_the_first_note(tmp_path: Path) -> None:
    StepJournal(tmp_path / "steps")
    made = (tmp_path / "steps").stat()
    assert made.st_blocks * 512 >= made.st_size, "on a full file system a note would end in a SIGBUS"


@pytest.mark.process
def test_a_crash_leaves_the_notes(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "steps")], cwd=os.getcwd())
    assert ended.returncode == -signal.SIGSEGV
    assert read_journal(tmp_path / "steps") == HeldSequences(("a", "b"), ("c",))


def test_what_was_being_written_is_nothing(tmp_path: Path) -> None:
    StepJournal(tmp_path / "steps").note("tiny", HeldSequences(("a",)))
    with (tmp_path / "steps").open("r+b") as file:
        file.write(bytes(8))  # zero length, as in the middle of a write
    assert read_journal(tmp_path / "steps") == NOTHING_HELD
    assert read_journal(tmp_path / "missing") == NOTHING_HELD


def test_more_than_the_file_holds_is_nothing(tmp_path: Path) -> None:
    StepJournal(tmp_path / "steps").note("tiny", HeldSequences(tuple("x" * 1000 + str(i) for i in range(2000))))
    assert read_journal(tmp_path / "steps") == NOTHING_HELD

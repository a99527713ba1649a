"""Copies of the project in which changes are tried: the checkout is never touched, so nothing has to be put back when a run is killed."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from load_tests.mutation.mutant import Mutant

Outcome = Literal["noticed", "survived", "moved", "no program", "unjudged"]
LIMIT_S = 1800.0  # of a run, waits for a slot included; pytest's own limit ends a test that hangs
# A time limit of pytest's own ends the whole process: a change that makes a test hang is noticed.
OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not slow")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)


class Trial(NamedTuple):
    outcome: Outcome
    by: str = ""  # the test that failed first
    seconds: float = 0.0


class Copy:
    """One working copy. Used by one thread at a time."""

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        self.folder = folder
        self._prefix = prefix  # of every command: `nice`, for example

    def failing(self, tests: Sequence[str]) -> str | None:
        """The first of the tests that fails as things are, or the last thing said; None: they pass."""
        command = [*self._prefix, sys.executable, "-m", "pytest", *OPTIONS, *tests]
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status = process.wait(LIMIT_S)
            except BaseException as interruption:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                if not isinstance(interruption, subprocess.TimeoutExpired):
                    raise
                status = -1
            output.seek(0)
            failed = _FAILED.search(text := output.read())
        if status == 0:
            return None
        return failed[1] if failed else text.strip().rpartition("\n")[2]

    def tried(self, mutant: Mutant, tests: Sequence[str]) -> Trial:
        path = self.folder / mutant.file
        source = path.read_text()
        changed = mutant.applied_to(source)
        if changed is None:
            return Trial("moved")
        if path.suffix == ".py" and not _is_program(changed):
            return Trial("no program")
        began = time.monotonic()
        try:
            self._write(path, changed)
            noticed_by = self.failing(tests)
        finally:
            self._write(path, source)
        seconds = round(time.monotonic() - began, 1)
        if noticed_by is None:
            return Trial("survived", "", seconds)
        if self.failing([noticed_by] if "::" in noticed_by else tests) is not None:
            return Trial("unjudged", f"{noticed_by} fails without the change", seconds)
        return Trial("noticed", noticed_by, seconds)

    def _write(self, path: Path, text: str) -> None:
        """With a time of its own: Python believes compiled code of the same second and size."""
        at = path.stat().st_mtime_ns + 2 * 10**9
        path.write_text(text)
        os.utime(path, ns=(at, at))


@contextmanager
def copy_of(root: Path, prefix: Sequence[str] = ()) -> Iterator[Copy]:
    """Copy what git knows and does not ignore, as it is in the working tree."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0")
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        for name in filter(None, names):
            if (root / name).is_file():
                (Path(folder) / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, Path(folder) / name, follow_symlinks=False)
        yield Copy(Path(folder), prefix)


def _is_program(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True

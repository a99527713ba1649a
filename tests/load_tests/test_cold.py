"""The cold bench's command line."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
def test_a_number_that_measures_nothing_is_refused_before_anything_starts(option: str, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "load_tests.scenarios.cold",
        "--sizes",
        "ember",
        "--folder",
        str(tmp_path),
        option,
        "0",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith(f"error: argument {option}: 0 is less than 1\n")

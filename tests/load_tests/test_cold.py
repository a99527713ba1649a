"""The command line of the cold start benchmark."""

import sys
from pathlib import Path

import pytest

from load_tests.scenarios import cold


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
def test_a_number_that_measures_nothing_is_refused_before_anything_starts(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cold", "--sizes", "ember", "--folder", str(tmp_path), option, "0"])
    with pytest.raises(SystemExit) as refused:
        cold.main()
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {option}: 0 is less than 1\n")

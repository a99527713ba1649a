"""The command line of the cold start benchmark."""

from pathlib import Path

import pytest

from load_tests.scenarios import cold


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
def test_a_number_that_measures_nothing_is_refused_before_anything_starts(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        cold.main(["--sizes", "ember", "--folder", str(tmp_path), option, "0"])
    assert refused.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {option}: 0 is less than 1\n")

"""The command line as a whole."""

import re

import pytest
import typer

from pilotlight.runtime.cli.commands import pilotlight


def test_the_version_is_that_of_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        pilotlight(version=True)
    assert re.fullmatch(r"pilotlight \d+\.\d+\S*\n", capsys.readouterr().out)

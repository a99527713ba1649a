"""The pull command as a user runs it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app
from pilotlight.runtime.cli.models.pull import pull
from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.runtime.fetching.short_names import EMBEDDED

runner = CliRunner()


def test_what_is_here_already_is_named(tmp_path: Path) -> None:
    for model, place in (("ember", EMBEDDED / "ember"), (str(tmp_path), tmp_path)):
        done = runner.invoke(app, ["pull", model])
        assert done.exit_code == 0, done.output
        assert done.stdout.strip() == str(place)
        assert "is here already" in done.stderr


def test_a_hub_id_is_downloaded_and_its_place_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async def downloaded(hub_id: str, on_progress: Progress | None) -> Path:
        assert hub_id == "org/name"
        assert on_progress is not None
        on_progress(1, 2)
        return tmp_path

    pull("org/name", downloaded)
    assert capsys.readouterr().out.strip() == str(tmp_path)


def test_what_cannot_be_had_is_a_sentence() -> None:
    async def downloaded(hub_id: str, on_progress: Progress | None) -> Path:
        raise FetchError("there is no model org/name on the hub")

    for model, reason in (("org/name", "no model org/name on the hub"), ("llama3", "a hub id looks like org/name")):
        with pytest.raises(CliError, match=reason):
            pull(model, downloaded)

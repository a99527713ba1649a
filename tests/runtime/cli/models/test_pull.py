"""The pull command as a user runs it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app
from pilotlight.runtime.fetching.errors import FetchError, Progress
from pilotlight.runtime.fetching.short_names import EMBEDDED
from pilotlight.runtime.models import sources

runner = CliRunner()


def test_what_is_here_already_is_named(tmp_path: Path) -> None:
    for model, place in (("ember", EMBEDDED / "ember"), (str(tmp_path), tmp_path)):
        done = runner.invoke(app, ["pull", model])
        assert done.exit_code == 0, done.output
        assert done.stdout.strip() == str(place)
        assert "is here already" in done.stderr


def test_a_hub_id_is_downloaded_and_its_place_printed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def downloaded(hub_id: str, on_progress: Progress) -> Path:
        assert hub_id == "org/name"
        on_progress(1, 2)
        return tmp_path

    monkeypatch.setattr(sources, "downloaded", downloaded)
    done = runner.invoke(app, ["pull", "org/name"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(tmp_path)


def test_what_cannot_be_had_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def downloaded(hub_id: str, on_progress: Progress) -> Path:
        raise FetchError("there is no model org/name on the hub")

    monkeypatch.setattr(sources, "downloaded", downloaded)
    for model, reason in (("org/name", "no model org/name on the hub"), ("llama3", "a hub id looks like org/name")):
        done = runner.invoke(app, ["pull", model])
        assert isinstance(done.exception, CliError)
        assert reason in str(done.exception)

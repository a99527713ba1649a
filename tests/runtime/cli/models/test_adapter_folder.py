"""The adapters commands as a user runs them: a site reads an added adapter, and invalid ones are refused."""

import shutil
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pilotlight.runtime.cli.cli_error import CliError
from pilotlight.runtime.cli.commands import app
from pilotlight.runtime.models.adapters import AdapterRegistry
from pilotlight.sites.site import ModelConfig
from tests.adapters import write_adapter
from tests.audit_events import observed_calls
from tests.checkpoints import write_llama

runner = CliRunner()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_adapter(folder / "adapter", write_llama(folder / "model"))
    return folder / "adapter"


def refuse_renames(event: str, arguments: tuple[object, ...]) -> None:
    if event == "os.rename":
        raise PermissionError(13, "Permission denied")


def test_an_adapter_is_added_listed_and_removed(adapter: Path, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    site = AdapterRegistry([ModelConfig(name="m", source="embedded:ember", adapters_dir=str(folder))])
    added = runner.invoke(app, ["adapters", "add", "tone", str(adapter), "--dir", str(folder)])
    assert added.exit_code == 0, added.output
    assert "tone: rank 4, 21 projections" in added.output
    assert site.names("m") == ["tone"]
    assert stat.S_IMODE((folder / "tone").stat().st_mode) == 0o755, "a site may run as another user"
    with observed_calls(refuse_renames):
        kept = runner.invoke(app, ["adapters", "remove", "tone", "--dir", str(folder)])
    assert "cannot be removed: Permission denied" in str(kept.exception)
    again = runner.invoke(app, ["adapters", "add", "tone", str(adapter), "--dir", str(folder)])
    assert "has an adapter tone already" in str(again.exception)
    listed = runner.invoke(app, ["adapters", "list", "--dir", str(folder)])
    assert "rank 4" in listed.output
    removed = runner.invoke(app, ["adapters", "remove", "tone", "--dir", str(folder)])
    assert removed.exit_code == 0, removed.output
    assert site.names("m") == []
    assert list(folder.iterdir()) == []
    gone = runner.invoke(app, ["adapters", "remove", "tone", "--dir", str(folder)])
    assert "has no adapter tone" in str(gone.exception)


def test_what_a_site_would_refuse_is_not_added(adapter: Path, tmp_path: Path) -> None:
    folder, pickled = tmp_path / "adapters", tmp_path / "pickled"
    shutil.copytree(adapter, pickled)
    (pickled / "adapter_model.safetensors").rename(pickled / "adapter_model.bin")
    for name, directory, words in (
        ("../up", adapter, "is not a valid name"),
        ("tone", pickled, "a pickled file may run any code"),
        ("tone", tmp_path / "nowhere", "cannot be used as an adapter"),
    ):
        failed = runner.invoke(app, ["adapters", "add", name, str(directory), "--dir", str(folder)])
        assert isinstance(failed.exception, CliError)
        assert words in str(failed.exception)
    assert not folder.exists()


def test_a_damaged_adapter_is_listed_with_its_error(adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "tone")
    (tmp_path / "tone" / "adapter_model.safetensors").write_bytes(b"")
    listed = runner.invoke(app, ["adapters", "list", "--dir", str(tmp_path)])
    assert listed.exit_code == 0
    assert "cannot be used" in listed.output

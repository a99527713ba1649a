"""Where a model's files are: never the network for a local name, one sentence for whatever is missing."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from runtime.engines import sources
from runtime.engines.sources import SourceError, directory_of, local_directory


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert local_directory(str(tmp_path)) == tmp_path


def test_an_embedded_model_is_a_directory_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark").mkdir()
    (tmp_path / "spark" / "config.json").write_text("{}")
    monkeypatch.setattr(sources, "EMBEDDED", tmp_path)
    assert local_directory("embedded:spark") == tmp_path / "spark"
    with pytest.raises(SourceError, match="no embedded model 'flame'; embedded models: spark"):
        local_directory("embedded:flame")


@pytest.mark.parametrize("source", ["/no/such/place", "./missing", "missing", "a/b/c"])
def test_a_missing_directory_is_a_sentence(source: str) -> None:
    with pytest.raises(SourceError, match="there is no directory"):
        local_directory(source)


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(SourceError, match=r"is a file; name the directory"):
        local_directory(str(file))


async def test_a_hub_id_is_downloaded_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def download(hub_id: str, **options: Any) -> str:
        assert hub_id == "org/name"
        assert "*.safetensors" in options["allow_patterns"]
        for total in (100, 50):
            bar = options["tqdm_class"](total=total, unit="B", unit_scale=True, name="x")
            bar.update(total // 2)
            bar.update(total // 2)
            bar.close()
        files = options["tqdm_class"](total=2, desc="Fetching 2 files")
        files.update(1)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert await directory_of("org/name", lambda done, total: seen.append((done, total))) == tmp_path
    assert seen == [(50, 100), (100, 100), (125, 150), (150, 150)]


async def test_an_unreachable_hub_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(hub_id: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(SourceError, match="not in the local cache and the hub cannot be reached"):
        await directory_of("org/name")

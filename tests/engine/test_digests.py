"""Digests of weights, plain or packed: later loads must find the bytes of the first load."""

import logging
import os
import threading
from pathlib import Path

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelFailed, ModelSpec
from pilotlight.engine.host.model_loader import ModelLoader
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights.digests import check_sound, verify, verify_in_background
from tests.checkpoints import write_llama


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (directory / name).write_bytes(os.urandom(10_000))
    return directory


def looks(directory: Path) -> bool:
    return verify(directory, directory.parent, lambda seconds: None)


def flip(file: Path, *, secretly: bool) -> None:
    before = file.stat()
    content = bytearray(file.read_bytes())
    content[5000] ^= 1
    file.write_bytes(content)
    if secretly:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def test_a_checkpoint_that_stays_as_it_is_is_sound(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert looks(checkpoint)
    assert looks(checkpoint)
    check_sound(checkpoint, checkpoint.parent)
    assert caplog.messages == []


def test_damage_is_named_and_refused_until_the_file_is_fetched_again(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert looks(checkpoint)
    file = checkpoint / "model-2.safetensors"
    whole = file.read_bytes()
    flip(file, secretly=True)
    assert not looks(checkpoint)
    assert f"{file} is damaged" in caplog.text
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"model-2\.safetensors is damaged: .* fetch the checkpoint again"):
            check_sound(checkpoint, checkpoint.parent)
        assert not looks(checkpoint), "the damage must stay known"
    file.write_bytes(whole)
    check_sound(checkpoint, checkpoint.parent)
    assert looks(checkpoint)


def test_a_file_that_was_written_into_is_refused_before_it_is_loaded(checkpoint: Path) -> None:
    assert looks(checkpoint)
    file = checkpoint / "model-1.safetensors"
    whole = file.read_bytes()
    flip(file, secretly=False)
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors is damaged: .* by a rename, or remove "):
        check_sound(checkpoint, checkpoint.parent)
    assert not looks(checkpoint), "hosts that already serve the checkpoint must notice"
    file.write_bytes(whole)
    check_sound(checkpoint, checkpoint.parent)


def test_a_file_in_the_place_of_another_is_another_and_that_is_said(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert looks(checkpoint)
    other = checkpoint / "partial"
    other.write_bytes(os.urandom(10_000))
    other.replace(checkpoint / "model-1.safetensors")
    check_sound(checkpoint, checkpoint.parent)
    with caplog.at_level(logging.WARNING):
        assert looks(checkpoint)
    assert "model-1.safetensors was replaced since its last load, and holds other bytes" in caplog.text
    check_sound(checkpoint, checkpoint.parent)


def test_a_record_that_is_damaged_is_made_again(checkpoint: Path) -> None:
    assert looks(checkpoint)
    (record,) = checkpoint.parent.glob("*.json")
    whole = record.read_text()
    record.write_text(whole[:20])
    check_sound(checkpoint, checkpoint.parent)
    assert looks(checkpoint)
    assert record.read_text() == whole


def test_a_peer_that_serves_damage_is_notified(checkpoint: Path) -> None:
    assert looks(checkpoint)
    flip(checkpoint / "model-1.safetensors", secretly=True)
    told = threading.Event()
    verify_in_background(checkpoint, checkpoint.parent, told.set, first_after_s=0.0)
    assert told.wait(60)


def test_a_packed_model_that_was_damaged_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    packed = tmp_path / "packed"
    path = pack_directory(tmp_path / "model", packed, "auto", Report())
    assert looks(packed)
    flip(path, secretly=True)
    assert not looks(packed)
    loader = ModelLoader(HostConfig(kv_bytes=1 << 20), digests=tmp_path)
    refused = loader._try_to_load(ModelSpec("tiny", str(packed)))
    assert isinstance(refused, ModelFailed)
    assert f"{path} is damaged: its bytes are not those of its first load" in refused.message

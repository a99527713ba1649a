"""Files of bootstrap programs: which are left, which are kept, and that none is believed with which something is wrong."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.api.struct import replace
from pilotlight.engine.bootstrap import bootstrap_store, recorder
from pilotlight.kernels.cpu import functions
from tests.engine.bootstraps import (
    CONFIG,
    Leave,
    bootstrapped,
    checkpoint,
    folder,
    found,
    leave,
    the_c_library_computes,
)
from tests.engine.families import MODELS, SEVERAL_TABLES, write_family
from tests.engine.test_decode_programs import DENSE

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no file is mapped in place"),
]

__all__ = ["checkpoint", "folder", "leave", "the_c_library_computes"]


@pytest.mark.parametrize("name", [name for name in MODELS if name not in DENSE or name in SEVERAL_TABLES])
def test_a_model_of_which_torch_computes_a_part_leaves_no_program(
    name: str, tmp_path: Path, folder: Path, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    write_family(tmp_path, name, torch.float32)
    with caplog.at_level(logging.INFO):
        leave(tmp_path)
    assert "tiny has no bootstrap program" in caplog.text
    assert found(tmp_path) is None


@pytest.mark.long
@pytest.mark.parametrize("change", ["weights", "config.json", "dtype", "kv_bytes", "block_size", "kv_tokens", "path"])
def test_a_program_is_not_used_for_anything_else(change: str, checkpoint: Path, tmp_path: Path, leave: Leave) -> None:
    leave(checkpoint)
    assert bootstrapped(checkpoint) is not None
    if change == "weights":
        os.utime(checkpoint / "model.safetensors", (1, 1))
        assert found(checkpoint) is None
    elif change == "config.json":
        (checkpoint / change).write_text((checkpoint / change).read_text() + " ")
        assert found(checkpoint) is None
    elif change == "dtype":
        assert found(checkpoint, dtype="bfloat16") is None
    else:
        if change == "kv_tokens":
            assert found(checkpoint, kv_tokens=512) is None
        elif change == "path":
            assert found(tmp_path) is None
        elif change == "kv_bytes":
            assert found(checkpoint, replace(CONFIG, kv_bytes=1 << 20)) is None
        else:
            assert found(checkpoint, replace(CONFIG, block_size=32)) is None


def test_a_host_of_other_sizes_leaves_a_program_of_its_own(checkpoint: Path, leave: Leave) -> None:
    leave(checkpoint)
    other = HostConfig(threads=1, kv_bytes=8 << 20)
    leave(checkpoint, other)
    assert bootstrapped(checkpoint, other) is not None


def _cut(content: bytearray) -> bytearray:
    return content[:-200_000]


def _cut_short(content: bytearray) -> bytearray:
    return content[:40]


def _flipped(content: bytearray) -> bytearray:
    content[300] ^= 1
    return content


def _flipped_in_a_weight(content: bytearray) -> bytearray:
    content[-1000] ^= 1
    return content


def _of_another_version(content: bytearray) -> bytearray:
    content[7] += 1
    return content


@pytest.mark.long
@pytest.mark.parametrize(
    "spoil", [_cut, _cut_short, _flipped, _flipped_in_a_weight, _of_another_version, lambda content: bytearray()]
)
def test_a_damaged_program_is_refused_and_made_again(
    spoil: Callable[[bytearray], bytearray], checkpoint: Path, leave: Leave, caplog: pytest.LogCaptureFixture
) -> None:
    leave(checkpoint)
    path = bootstrapped(checkpoint).path
    path.write_bytes(spoil(bytearray(path.read_bytes())))
    with caplog.at_level(logging.WARNING):
        assert found(checkpoint) is None
    assert "is not used" in caplog.text
    leave(checkpoint)
    assert bootstrapped(checkpoint) is not None


def test_a_program_in_a_folder_that_others_can_write_to_is_not_believed(
    checkpoint: Path, folder: Path, leave: Leave
) -> None:
    leave(checkpoint)
    folder.chmod(0o777)
    assert found(checkpoint) is None


def test_none_are_left_or_used_where_the_user_wants_none(
    checkpoint: Path, folder: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(checkpoint)
    monkeypatch.setenv(bootstrap_store.SWITCH, "0")
    assert found(checkpoint) is None
    monkeypatch.setenv(bootstrap_store.SWITCH, str(folder / "elsewhere"))
    monkeypatch.setattr(bootstrap_store, "MOST_OWN_BYTES", 1000)
    leave(checkpoint)
    assert list((folder / "elsewhere").iterdir()) == []


def test_programs_take_a_bounded_place_and_those_used_longest_ago_go_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    paths = [folder / f"{i}.bootstrap" for i in range(3)]
    for age, path in enumerate(paths):
        bootstrap_store.write(path, [bytes(1000)])
        os.utime(path, (1000 - age, 1000 - age))
    monkeypatch.setattr(bootstrap_store, "MOST_BYTES", 2500)
    left_by_a_killed_writer = folder / ".x.bootstrap.1234"
    left_by_a_killed_writer.write_bytes(b"half")
    os.utime(left_by_a_killed_writer, (1000, 1000))
    bootstrap_store.note_use(paths[1])
    bootstrap_store.write(paths[2], [bytes(1000)])
    assert sorted(folder.iterdir()) == [paths[1], paths[2]]


def test_a_full_disk_leaves_no_half_program(
    checkpoint: Path, folder: Path, leave: Leave, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Iterator[bytes]:
        yield b"begun"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "_content", full)
    with caplog.at_level(logging.INFO):
        leave(checkpoint)
    assert "No space left" in caplog.text
    assert list(folder.iterdir()) == []


def test_a_step_that_no_runner_can_make_smaller_is_not_left(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "follows_batch", lambda step, rows, blocks: not step.function.startswith("decode"))
    with caplog.at_level(logging.INFO):
        leave(checkpoint)
    assert "decode_attention_f32 cannot be adapted to a batch" in caplog.text


def test_a_library_without_a_function_is_refused(
    checkpoint: Path, leave: Leave, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    leave(checkpoint)

    def find(opened: functions.Opened, name: str) -> functions.Function:
        raise AttributeError(f"undefined symbol: {name}")

    monkeypatch.setattr(functions, "find", find)
    assert found(checkpoint) is None
    assert "undefined symbol" in caplog.text


@pytest.mark.process
def test_a_writer_ends_with_its_process(checkpoint: Path, folder: Path) -> None:
    """It sleeps, and holds nobody up."""
    code = """
import sys
from pilotlight.engine.bootstrap.recorder import BackgroundRecorder
BackgroundRecorder(lambda: sys.exit("it was made after the end"), first_after_s=600.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=100)

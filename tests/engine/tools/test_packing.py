"""Packing: a packed model gives the answers of its checkpoint, has its content's digest in its name, and survives file errors."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights.bundles import packed
from pilotlight.engine.weights.bundles.packed import verify
from tests.checkpoints import write_llama, write_tokenizer
from tests.engine.families import MODELS, PACKED, write_family
from tests.engine.file_faults import file_system_that_fills_up
from tests.engine.test_mapped_weights import answer, load

ROOT = Path(__file__).parents[3]
SOME = [
    "llama, biased",
    "gemma3, one kv head, untied",
    "mixtral, two of five experts",
    pytest.param(PACKED, marks=pytest.mark.cpu_only),  # on a GPU the experts stay in four bits
]


class Silent(Report):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[tuple[int, int]] = []

    def progress(self, done: int, total: int) -> None:
        self.said.append((done, total))


def packed_into(out: Path, directory: Path, dtype: str = "auto") -> Path:
    return pack_directory(directory, out, dtype, Silent())


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    return make_kv_memory(HostConfig(kv_bytes=4 << 20, threads=1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_llama(directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture
def directory(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a copy of the checkpoint for this test."""
    return Path(shutil.copytree(checkpoint, tmp_path / "model"))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "packed"


@pytest.mark.long
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.usefixtures("unpacked")
def test_a_packed_model_answers_as_its_checkpoint(
    name: str, dtype: str, tmp_path: Path, out: Path, memory: KvMemory
) -> None:
    """Both models multiply unpacked weights: products with codes round differently."""
    assert name in MODELS
    write_family(tmp_path / "model", name)
    packed_into(out, tmp_path / "model", dtype)
    info, expected = answer(tmp_path / "model", None, memory, dtype)
    found, heard = answer(out, None, memory)
    assert heard.logprobs == expected.logprobs
    assert found.mapped, "a packed model is used in place"
    assert (found.dtype, found.weights_bytes) == (info.dtype, info.weights_bytes)
    for mapped in (False, True):  # the first load fills a file in memory, the second maps it
        again, heard = answer(out, tmp_path / "kept", memory)
        assert (again.mapped, heard.logprobs) == (mapped, expected.logprobs)


def test_the_directory_has_everything_a_model_needs_and_no_other_weights(directory: Path, out: Path) -> None:
    path = packed_into(out, directory)
    names = {file.name for file in out.iterdir()}
    assert names == {
        path.name, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    verify(path, lambda done, total: None)


def test_packing_again_does_nothing_and_elsewhere_gives_the_same_name(
    directory: Path, out: Path, tmp_path: Path
) -> None:
    path = packed_into(out, directory)
    before = path.stat().st_mtime_ns
    assert packed_into(out, directory) == path
    assert path.stat().st_mtime_ns == before
    os.utime(directory / "model.safetensors", (1, 1))
    assert packed_into(tmp_path / "elsewhere", directory).name == path.name
    with pytest.raises(
        CheckpointError, match=r"is another bundle: it was made from a checkpoint.*choose another directory"
    ):
        packed_into(out, directory)


def contents(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def another(tmp_path: Path) -> Path:
    write_family(tmp_path / "another", SOME[1])
    return tmp_path / "another"


def test_a_model_refused_for_anothers_directory_leaves_it_as_it_was(directory: Path, out: Path, tmp_path: Path) -> None:
    packed_into(out, directory)
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"config\.json belongs to another model; choose another directory"):
        packed_into(out, another(tmp_path))
    os.utime(directory / "model.safetensors", (1, 1))  # now the bundle differs, with the same config.json
    (directory / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is another bundle"):
        packed_into(out, directory)
    assert contents(out) == before


def test_a_checkpoints_directory_is_not_packed_into(directory: Path, tmp_path: Path) -> None:
    before = contents(directory)
    with pytest.raises(CheckpointError, match=r"is a checkpoint's directory: it holds model\.safetensors"):
        packed_into(directory, another(tmp_path))
    assert contents(directory) == before


def test_verifying_finds_a_config_that_the_weights_were_not_packed_with(directory: Path, out: Path) -> None:
    path = packed_into(out, directory)
    config = out / "config.json"
    config.write_text(config.read_text() + "\n ")
    with pytest.raises(CheckpointError, match=r"is not the one that .* was packed with; pack the model again"):
        verify(path, lambda done, total: None)


def test_a_place_that_cannot_be_a_directory_is_a_sentence(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be made: .*; choose another directory"):
        packed_into(tmp_path / "file" / "packed", directory)


@pytest.mark.process
def test_packing_ends_silently_when_its_reader_has_left(directory: Path, out: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as stdout:
        command = [sys.executable, "-m", "pilotlight.engine.tools.packing", "pack", str(directory), str(out)]
        done = subprocess.run(command, cwd=ROOT, stdout=stdout, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_progress_rises_to_the_total(directory: Path, out: Path) -> None:
    report = Silent()
    pack_directory(directory, out, "auto", report)
    assert report.said == sorted(report.said)
    assert report.said[-1][0] == report.said[-1][1] > 0


KILLED = """
import os, signal, sys
from pathlib import Path
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights.bundles import packed
packed._GROUP_BYTES = 20_000
class Killed(Report):
    def progress(self, done, total):
        if done > total / 2:
            os.kill(os.getpid(), signal.SIGKILL)
pack_directory(Path(sys.argv[1]), Path(sys.argv[2]), "auto", Killed())
"""


@pytest.fixture(scope="module")
def half_packed(process_tier: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of a process that was killed after packing half of the checkpoint."""
    out = tmp_path_factory.mktemp("half")
    done = subprocess.run([sys.executable, "-c", KILLED, str(checkpoint), str(out)], cwd=ROOT, check=False)
    assert done.returncode == -signal.SIGKILL
    return out


@pytest.mark.process
def test_packing_continues_where_it_was_killed(
    directory: Path, half_packed: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(half_packed, out)
    assert not list(out.glob("*.safetensors"))
    written: list[str] = []
    fill = packed.fill  # type: ignore[attr-defined]  # replaced where it is called
    monkeypatch.setattr(packed, "fill", lambda jobs, **o: (written.extend(job.name for job in jobs), fill(jobs, **o)))
    path = packed_into(out, directory)
    verify(path, lambda done, total: None)
    assert 0 < len(written) < 30, "all of its 30 tensors were read again"
    assert not list(out.glob(".*"))


def test_what_a_killed_run_left_damaged_is_written_again(directory: Path, half_packed: Path, out: Path) -> None:
    shutil.copytree(half_packed, out)
    (partial,) = out.glob(".*.partial")
    content = bytearray(partial.read_bytes())
    content[20_000:21_000] = bytes(1000)
    partial.write_bytes(content)
    verify(packed_into(out, directory), lambda done, total: None)


def test_a_journal_of_another_layout_is_not_believed(directory: Path, half_packed: Path, out: Path) -> None:
    shutil.copytree(half_packed, out)
    (journal,) = out.glob(".*.journal")
    journal.write_text(journal.read_text().replace("\n", "\n", 1)[1:])
    verify(packed_into(out, directory), lambda done, total: None)


def test_a_flipped_bit_of_a_weight_is_found_and_its_tensor_named(directory: Path, out: Path) -> None:
    path = packed_into(out, directory)
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"is damaged in lm_head\.weight; fetch or pack it again"):
        verify(path, lambda done, total: None)


def test_a_renamed_bundle_is_not_what_it_is_called(directory: Path, out: Path) -> None:
    path = packed_into(out, directory)
    renamed = path.rename(path.with_name("0" * 32 + ".bundle.safetensors"))
    with pytest.raises(CheckpointError, match="should be called"):
        verify(renamed, lambda done, total: None)


def test_a_full_disk_is_an_error_with_a_remedy(directory: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        file_system_that_fills_up(patch)
        with pytest.raises(CheckpointError, match="make room and run it again, it continues where it was"):
            packed_into(out, directory)
    verify(packed_into(out, directory), lambda done, total: None)


def test_a_cut_off_bundle_and_a_changed_config_are_refused(directory: Path, out: Path, memory: KvMemory) -> None:
    path = packed_into(out, directory)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(CheckpointError, match=r"packed with another config\.json"):
        load(out, None, memory)
    os.truncate(path, path.stat().st_size - 4096)
    with pytest.raises(CheckpointError, match=r"cut off.*pack the model again"):
        load(out, None, memory)


def test_another_type_than_the_packed_one_is_refused(directory: Path, out: Path, memory: KvMemory) -> None:
    packed_into(out, directory, "float32")
    with pytest.raises(CheckpointError, match="was packed as float32; set dtype to auto, or pack it again as bfloat16"):
        load(out, None, memory, "bfloat16")


def test_places_where_nothing_can_be_packed_are_refused(directory: Path, out: Path) -> None:
    with pytest.raises(CheckpointError, match="own directory"):
        packed_into(directory, directory)
    packed_into(out, directory)
    with pytest.raises(CheckpointError, match="is packed already"):
        packed_into(out / "again", out)


def test_two_runs_at_once_are_not_let_into_one_directory(directory: Path, half_packed: Path, out: Path) -> None:
    shutil.copytree(half_packed, out)
    (partial,) = out.glob(".*.partial")
    with partial.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process is packing"):
            packed_into(out, directory)

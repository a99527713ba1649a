"""Weights that were looked at before anybody asked for them: nothing is done twice, and nothing is believed that may have changed."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import CheckpointError
from engine.loading import KvMemory, make_kv_memory
from engine.weights import ahead, filling, supply
from kernels.cpu import library
from kernels.cpu.build import build_library
from tests.checkpoints import write_llama
from tests.engine.agreement import full
from tests.engine.driver import Heard, one, random_prompt
from tests.engine.test_in_place import spoil
from tests.engine.test_mapped_weights import CONFIG, load

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere nothing is mapped ahead")


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    build_library()
    library.start(wait=True)
    return make_kv_memory(CONFIG)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However small a model is."""
    monkeypatch.setattr(supply, "IN_PLACE_FROM_BYTES", 0)
    monkeypatch.setattr(supply, "IN_PLACE_SHARE", 0.01)
    monkeypatch.setattr(ahead, "IN_PLACE_FROM_BYTES", 0)
    ahead.drop()
    yield
    ahead.drop()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def looked_at_later(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The values that a load looked at itself."""
    found: list[torch.Tensor] = []
    are_finite = filling.are_finite

    def counted(values: torch.Tensor) -> bool:
        found.append(values)
        return are_finite(values)

    monkeypatch.setattr(filling, "are_finite", counted)
    return found


def begin(directory: Path) -> None:
    """And wait until all has been looked at that comes before a value that is no number."""
    ahead.begin(directory, "auto")
    assert ahead._ahead is not None
    looking = ahead._ahead._looking
    assert looking is not None
    assert looking._looker is not None
    ends = [opened.to_look_at.ranges[-1].end for opened in ahead._ahead._opened]
    before, deadline = [-1], time.monotonic() + 30
    while (looked := [file.looked for file in looking._described]) != ends and (looked != before or sum(looked) == 0):
        before = looked
        assert time.monotonic() < deadline
        time.sleep(0.2)


def answer(directory: Path, memory: KvMemory) -> Heard:
    loaded = load(directory, None, memory)
    try:
        assert "map" in dict(loaded.engine.info.load_phases)
        return one(loaded.engine, full("a", random_prompt(30, seed=3), max_tokens=3, salt=os.urandom(8)))
    finally:
        loaded.close()


@pytest.mark.parametrize("max_shard_size", ["5GB", "150KB"])
def test_what_was_looked_at_ahead_is_not_looked_at_again(
    max_shard_size: str, tmp_path: Path, memory: KvMemory, looked_at_later: list[torch.Tensor]
) -> None:
    write_llama(tmp_path, max_shard_size=max_shard_size)
    expected = answer(tmp_path, memory)
    usually = sum(values.nbytes for values in looked_at_later)
    looked_at_later.clear()
    begin(tmp_path)
    heard = answer(tmp_path, memory)
    assert (heard.token_ids, heard.logprobs) == (expected.token_ids, expected.logprobs)
    assert sum(values.nbytes for values in looked_at_later) < usually / 2


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_value_that_is_no_number_is_the_load_s_own_error(value: float, directory: Path, memory: KvMemory) -> None:
    spoil(directory, "model.layers.1.mlp.down_proj.weight", value)
    begin(directory)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight in model\.safetensors holds NaN or infinity"
    ):
        load(directory, None, memory)


def test_a_file_that_is_replaced_after_the_look_is_looked_at_again(directory: Path, memory: KvMemory) -> None:
    begin(directory)
    spoil(directory, "model.layers.0.mlp.down_proj.weight", torch.nan)
    with pytest.raises(CheckpointError, match="holds NaN"):
        load(directory, None, memory)


def test_a_file_that_is_written_to_after_the_look_is_looked_at_again(directory: Path, memory: KvMemory) -> None:
    begin(directory)
    file = directory / "model.safetensors"
    size, times = file.stat().st_size, file.stat()
    with file.open("r+b") as opened:
        opened.seek(size - 4)
        opened.write(b"\xff\xff\xff\xff")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))  # whoever sets the clock back does not hide it
    assert file.stat().st_size == size
    with pytest.raises(CheckpointError, match="holds NaN"):
        load(directory, None, memory)


def test_another_model_than_the_expected_one_is_loaded_and_the_expected_one_let_go(
    directory: Path, tmp_path: Path, memory: KvMemory
) -> None:
    write_llama(tmp_path / "other", seed=4)
    expected = answer(tmp_path / "other", memory)
    begin(directory)
    assert str(directory) in Path("/proc/self/maps").read_text()
    assert answer(tmp_path / "other", memory).logprobs == expected.logprobs
    ahead.drop()
    assert str(directory) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("problem", ["gone", "header", "half", "small"])
def test_what_cannot_be_looked_at_is_left_to_the_load(
    problem: str, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    match problem:
        case "gone":
            directory = tmp_path / "none"
        case "header":
            (directory / "model.safetensors").write_bytes(b"\xff" * 100)
        case "half":  # the load converts it
            save_file({"a": torch.ones(1 << 20, dtype=torch.float16)}, directory / "model.safetensors")
        case "small":
            monkeypatch.setattr(ahead, "IN_PLACE_FROM_BYTES", 1 << 30)
    ahead.begin(directory, "auto")
    assert ahead._ahead is None or not ahead._ahead._opened
    ahead.drop()


def test_a_process_may_end_in_the_middle_of_a_look(tmp_path: Path) -> None:
    write_llama(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    header = b'{"a":{"dtype":"BF16","shape":[4294967296],"data_offsets":[0,8589934592]}}'
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (8 << 30))  # of nothing: zeros that are on no disk
    program = (
        "import sys\nfrom pathlib import Path\nfrom engine.weights import ahead\n"
        "ahead.begin(Path(sys.argv[1]), 'auto')\nassert ahead._ahead is not None and ahead._ahead._looking is not None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], timeout=60, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

"""Models whose weights are in a file that outlives the engine host: the same results, no second read, and recovery from damage."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import HostConfig, ModelInfo, ModelSpec
from pilotlight.engine.core.engine import Engine
from pilotlight.engine.host.model_loader import ModelLoader
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.weights.bundles.bundle import lay_out
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, new_bundle
from pilotlight.engine.weights.bundles.bundle_maps import MAPS
from pilotlight.engine.weights.filling import ReadingProgress
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits
from tests.checkpoints import change_config, write_llama
from tests.embedders import EMBEDDERS, write_embedder
from tests.engine.agreement import full
from tests.engine.driver import Heard, one, random_prompt, submit
from tests.engine.families import MODELS, SWEPT, write_family
from tests.engine.file_faults import change_at, file_system_that_fills_up, forbid_checkpoints, full_file_system

CONFIG = HostConfig(kv_bytes=4 << 20, threads=1)
REQUEST = full("a", random_prompt(30, seed=3), max_tokens=3)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    return make_kv_memory(CONFIG)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model")
    return tmp_path / "model"


def load(
    directory: Path,
    kept_at: Path | None,
    memory: KvMemory,
    dtype: Any = "auto",
    limits: WeightLimits = USUAL_LIMITS,
    on_progress: ReadingProgress | None = None,
) -> LoadedModel:
    path = None if kept_at is None else str(kept_at)
    spec = ModelSpec(
        "tiny", str(directory), dtype, weights_file=path, lossless="off"
    )  # off, as it depends on the machine whether 12 bits are faster
    return load_model(spec, CONFIG, memory, on_progress, limits=limits)


def answer(directory: Path, kept_at: Path | None, memory: KvMemory, dtype: Any = "auto") -> tuple[ModelInfo, Heard]:
    loaded = load(directory, kept_at, memory, dtype)
    try:
        return loaded.engine.info, one(loaded.engine, REQUEST)
    finally:
        loaded.close()


def mappings(engine: Engine) -> set[str]:
    """Return the files in which two tensors of a model are mapped."""
    model: Any = engine.runner.model  # type: ignore[attr-defined]
    addresses = [model.embedding.weight.values.data_ptr(), model.layers[0].attention.qkv_proj.weight.values.data_ptr()]
    found = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        found |= {line.split(maxsplit=5)[-1] for address in addresses if start <= address < end}
    return found


@pytest.mark.parametrize("name", [*MODELS, *SWEPT])
def test_a_mapped_model_answers_as_a_loaded_one(name: str, tmp_path: Path, kept_at: Path, memory: KvMemory) -> None:
    write_family(tmp_path, name)
    alone, expected = answer(tmp_path, None, memory)
    first, written = answer(tmp_path, kept_at, memory)
    again, mapped = answer(tmp_path, kept_at, memory)
    assert [info.mapped for info in (alone, first, again)] == [False, False, True]
    assert mapped.logprobs == written.logprobs == expected.logprobs
    assert again.weights_bytes == first.weights_bytes == alone.weights_bytes


@pytest.mark.parametrize("name", EMBEDDERS)
def test_a_mapped_embedder_makes_the_same_vectors(name: str, tmp_path: Path, kept_at: Path, memory: KvMemory) -> None:
    write_embedder(tmp_path, EMBEDDERS[name])
    vectors = []
    for path in (None, kept_at, kept_at):
        engine = load(tmp_path, path, memory).engine
        pooling = engine.info.pooling
        vectors.append(one(engine, submit("a", random_prompt(20, seed=4), pooling=pooling)).embedding)
    assert engine.info.mapped
    assert vectors[0] == vectors[1] == vectors[2]


@pytest.mark.cpu_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_weights_are_the_files_own_pages(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    for _ in range(2):
        loaded = load(directory, kept_at, memory)
        assert mappings(loaded.engine) == {str(kept_at)}
        loaded.close()


def test_waking_reads_no_weights(
    directory: Path, kept_at: Path, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(directory, kept_at, memory)
    forbid_checkpoints(monkeypatch)
    assert load(directory, kept_at, memory).engine.info.mapped


@pytest.mark.cpu_only
def test_a_load_says_what_its_time_went_into(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    for is_proved in (False, True):
        info = load(directory, kept_at, memory).engine.info
        phases = dict(info.load_phases)
        assert {"config", "fingerprint", "kv", "weights", "build"} <= phases.keys()
        assert ("warm_up" in phases) is not is_proved
        assert sum(phases.values()) == pytest.approx(info.load_s)


def test_weights_that_make_no_numbers_are_refused_by_every_load(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"].fill_(3e38)
    tensors["model.norm.weight"].fill_(1e5)
    save_file(tensors, directory / "model.safetensors")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="logits are not finite"):
            load(directory, kept_at, memory)
        assert not kept_at.exists()


def damage_header(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[300] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [(damage_header, "its seal does not match"), (lambda path: path.write_bytes(b""), "cannot hold its header")],
)
def test_a_damaged_bundle_is_refused_by_name_and_made_again(
    damage: Any, words: str, directory: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    _, expected = answer(directory, kept_at, memory)
    damage(kept_at)
    info, heard = answer(directory, kept_at, memory)
    assert not info.mapped
    assert heard.logprobs == expected.logprobs
    # A further warning is ignored: a file on a disk is not registered with a GPU.
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    (record,) = [record for record in told if record.name != "pilotlight.engine.device.registered_memory"]
    assert str(kept_at) in record.getMessage()
    assert words in record.getMessage()
    assert load(directory, kept_at, memory).engine.info.mapped


def change_weights(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_weights, "was made from a checkpoint of fingerprint"),
        (lambda directory: change_config(directory, rms_norm_eps=0.1), "was made with a config.json of digest"),
        (
            lambda directory: change_config(directory, architectures=["MistralForCausalLM"]),
            "is of architecture LlamaForCausalLM, not MistralForCausalLM",
        ),
    ],
)
def test_a_bundle_of_another_kind_is_not_used(
    change: Any, words: str, directory: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    load(directory, kept_at, memory)
    change(directory)
    _, expected = answer(directory, None, memory)
    info, heard = answer(directory, kept_at, memory)
    assert not info.mapped
    assert heard.logprobs == expected.logprobs
    assert words in caplog.text


def test_each_type_has_a_bundle_of_its_own(
    directory: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    load(directory, kept_at, memory, "float32")
    _, expected = answer(directory, None, memory, "bfloat16")
    info, heard = answer(directory, kept_at, memory, "bfloat16")
    assert (info.mapped, info.dtype) == (False, "bfloat16")
    assert heard.logprobs == expected.logprobs
    assert "it holds float32, not bfloat16" in caplog.text
    assert load(directory, kept_at, memory, "bfloat16").engine.info.mapped


def test_a_bundle_with_other_tensors_than_the_model_wants_is_made_again(
    directory: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """A bundle of another layout remains if the engine changes without a new version of its bundles."""
    _, expected = answer(directory, kept_at, memory)
    with BundleFile.open(kept_at) as file:
        made = file.bundle
    wanted = [place.spec for place in made.tensors]
    wanted[1] = wanted[1]._replace(name="renamed")
    other = lay_out(made.identity, made.facts, wanted)
    with new_bundle(kept_at, other):
        pass
    info, heard = answer(directory, kept_at, memory)
    assert heard.logprobs == expected.logprobs
    assert not info.mapped
    assert "but the model needs TensorSpec(name='model.layers.0.input_layernorm.weight'" in caplog.text


@pytest.mark.parametrize("is_full_from_the_start", [True, False])
def test_a_full_file_system_costs_the_file_and_not_the_answer(
    is_full_from_the_start: bool,
    directory: Path,
    kept_at: Path,
    memory: KvMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, expected = answer(directory, None, memory)
    (full_file_system if is_full_from_the_start else file_system_that_fills_up)(monkeypatch)
    info, heard = answer(directory, kept_at, memory)
    assert not info.mapped
    assert heard.logprobs == expected.logprobs
    assert ("has 0.1 MiB free: " if is_full_from_the_start else "") + "give it more room" in caplog.text
    assert list(kept_at.parent.iterdir()) == []


def test_a_place_that_is_not_there_costs_no_answer(
    directory: Path, tmp_path: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    info, _ = answer(directory, tmp_path / "nowhere" / "tiny.weights", memory)
    assert not info.mapped
    assert "nowhere" in caplog.text


def test_a_checkpoint_that_is_refused_leaves_no_bundle(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][7] = torch.nan
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight in model\.safetensors holds NaN"):
        load(directory, kept_at, memory)
    assert list(kept_at.parent.iterdir()) == []


def test_a_checkpoint_that_changes_while_it_is_read_leaves_no_bundle(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        load(directory, kept_at, memory, on_progress=change_at(directory / "model.safetensors"))
    assert list(kept_at.parent.iterdir()) == []


def test_an_evicted_bundle_stays_for_processes_that_have_mapped_it(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    _, expected = answer(directory, kept_at, memory)
    loaded = load(directory, kept_at, memory)
    kept_at.unlink()
    assert one(loaded.engine, REQUEST).logprobs == expected.logprobs
    assert not load(directory, kept_at, memory).engine.info.mapped


ANOTHER_HOST = """
import sys
from pathlib import Path
from tests.engine.test_mapped_weights import CONFIG, REQUEST, load, make_kv_memory
from tests.engine.driver import one
loaded = load(Path(sys.argv[1]), Path(sys.argv[2]), make_kv_memory(CONFIG))
print(loaded.engine.info.mapped, one(loaded.engine, REQUEST).token_ids, flush=True)
sys.stdin.readline()
"""


@pytest.mark.process
@pytest.mark.cpu_only
def test_two_hosts_share_a_bundle_and_one_that_is_killed_takes_nothing_along(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    _, expected = answer(directory, kept_at, memory)
    inode = kept_at.stat().st_ino
    command = [sys.executable, "-c", ANOTHER_HOST, str(directory), str(kept_at)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == f"True {expected.token_ids}\n"
        mine = load(directory, kept_at, memory)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (os.getpid(), host.pid)]
        assert all(f" {inode} " in text for text in maps)
        host.send_signal(signal.SIGKILL)
    assert one(mine.engine, REQUEST).logprobs == expected.logprobs
    assert load(directory, kept_at, memory).engine.info.mapped


def is_mapped(path: Path) -> bool:
    return f"{path}" in Path("/proc/self/maps").read_text()


@pytest.mark.cpu_only
def test_a_model_that_wakes_lies_where_it_lay(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    load(directory, kept_at, memory).close()
    first = load(directory, kept_at, memory)
    expected, address = one(first.engine, REQUEST), weights_at(first)
    first.close()
    del first
    assert is_mapped(kept_at)
    again = load(directory, kept_at, memory)
    assert weights_at(again) == address
    assert one(again.engine, REQUEST).token_ids == expected.token_ids
    again.close()


def weights_at(loaded: LoadedModel) -> int:
    model: Any = loaded.engine.runner.model  # type: ignore[attr-defined]
    return int(model.embedding.weight.values.data_ptr())


@pytest.mark.cpu_only
def test_the_memory_of_a_removed_bundle_is_let_go(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    load(directory, kept_at, memory).close()
    load(directory, kept_at, memory).close()
    gc.collect()
    MAPS.drop_removed_maps()
    assert is_mapped(kept_at), "the map must stay while the file exists"
    kept_at.unlink()
    MAPS.drop_removed_maps()
    assert not is_mapped(kept_at)


def test_a_bundle_in_the_place_of_another_is_mapped_anew(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    load(directory, kept_at, memory).close()
    address = weights_at(first := load(directory, kept_at, memory))
    first.close()
    copy = kept_at.with_suffix(".copy")
    copy.write_bytes(kept_at.read_bytes())
    copy.rename(kept_at)
    again = load(directory, kept_at, memory)
    assert again.engine.info.mapped
    assert weights_at(again) != address, "the pages of the replaced file must not be used"
    again.close()


@pytest.mark.long
@pytest.mark.cpu_only
def test_a_host_lets_go_what_its_site_removes_while_it_rests(directory: Path, kept_at: Path) -> None:
    loader = ModelLoader(CONFIG)
    loader.start()
    try:
        for _ in range(2):
            loader.load(ModelSpec("tiny", str(directory), weights_file=str(kept_at)))
            loaded: list[Any] = []
            while not loaded:
                loaded = [result for _, result in loader.take_results() if isinstance(result, LoadedModel)]
            loaded[0].close()
        loaded.clear()
        assert is_mapped(kept_at)
        kept_at.unlink()
        deadline = time.monotonic() + 60
        while is_mapped(kept_at):
            assert time.monotonic() < deadline, "the memory of a removed file is not released"
            gc.collect()
            time.sleep(0.01)
    finally:
        loader.close()

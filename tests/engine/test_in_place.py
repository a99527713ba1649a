"""Models that use the mapped pages of their checkpoint: the same results, the same errors, and a relocation into memory without effect on answers."""

import dataclasses
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.api.protocol import ModelSpec
from pilotlight.engine.api.struct import replace
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.weights.bundles.bundle_file import BundleWriter
from pilotlight.engine.weights.checkpoint import is_local
from pilotlight.engine.weights.relocation import Relocation
from pilotlight.engine.weights.weight_limits import USUAL_LIMITS, WeightLimits
from pilotlight.kernels.cpu import library
from tests.checkpoints import write_llama
from tests.embedders import EMBEDDERS, write_embedder
from tests.engine import test_mapped_weights as mapped_weights
from tests.engine.agreement import TOLERANCE, as_distribution, full
from tests.engine.driver import Heard, drain, one, random_prompt, submit
from tests.engine.families import MODELS, write_family
from tests.engine.file_faults import change_at, file_system_that_fills_up, full_file_system
from tests.engine.test_mapped_weights import CONFIG, mappings
from tests.in_turn import in_turn

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere weights are read"),
]

ROOT = Path(__file__).parents[2]
# Use pages in place for models of any size, and relocate without pauses.
EAGER = WeightLimits(in_place_from_bytes=0, in_place_share=0.01, move_after_s=0.0, move_share=1.0, unmap_after_s=0.0)
COPIED = dataclasses.replace(EAGER, in_place_from_bytes=1 << 40)
load = partial(mapped_weights.load, limits=EAGER)


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    return make_kv_memory(CONFIG)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the relocation until the event is set."""
    event = threading.Event()
    write = BundleWriter.write

    def write_later(self: BundleWriter, start: int, content: memoryview) -> None:
        if threading.current_thread().name == "relocation" and start:
            assert event.wait(60)
        write(self, start, content)

    monkeypatch.setattr(BundleWriter, "write", write_later)
    yield event
    event.set()  # so that a failed test does not delay others


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model")
    return tmp_path / "model"


def copied(directory: Path, memory: KvMemory, dtype: Any = "auto") -> list[Heard]:
    """Return answers of the model with its weights in allocated memory."""
    loaded = load(directory, None, memory, dtype, limits=COPIED)
    assert "map" not in dict(loaded.engine.info.load_phases)
    return answers(loaded, close=True)


def answers(loaded: LoadedModel, close: bool = False) -> list[Heard]:
    """Return answers to two prompts. A new salt each time avoids cached blocks.

    The second prompt has too many rows for the C library's products in bf16.
    """
    salt = os.urandom(8)
    try:
        return [
            one(loaded.engine, full("a", random_prompt(30, seed=3), max_tokens=3, salt=salt)),
            one(loaded.engine, submit("b", random_prompt(90, seed=5), salt=salt, max_tokens=2, num_logprobs=5)),
        ]
    finally:
        if close:
            loaded.close()


def assert_same(found: list[Heard], expected: list[Heard], by_torch: bool = False) -> None:
    """Compare bit by bit if the C library computes. In torch the order of sums depends on the address of a matrix."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.token_ids == theirs.token_ids
        if library.loaded is not None and not by_torch:
            assert mine.logprobs == theirs.logprobs
        for own, other in zip(mine.logprobs, theirs.logprobs, strict=True):
            assert (as_distribution(own) - as_distribution(other)).nan_to_num().abs().max() <= TOLERANCE


def has_moved(loaded: LoadedModel) -> bool:
    assert isinstance(loaded.under_weights, Relocation)
    assert loaded.under_weights.wait(60)
    return loaded.under_weights.is_done


def write_in_order(directory: Path, names: list[str], padding: int = 0) -> None:
    """Write the tensors of the checkpoint in the order of `names`, after `padding` bytes."""
    tensors = load_file(directory / "model.safetensors")
    assert sorted(names) == sorted(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[tensors[name].dtype]
        header[name] = {
            "dtype": dtype,
            "shape": list(tensors[name].shape),
            "data_offsets": [end, end + tensors[name].nbytes],
        }
        end += tensors[name].nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    content = b"".join(tensors[name].view(torch.uint8).numpy().tobytes() for name in names)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content)


def test_a_model_whose_first_token_is_waited_for_is_proved_by_that_prompt(
    tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    write_family(tmp_path, next(iter(MODELS)), torch.bfloat16)
    spec = ModelSpec("m", str(tmp_path), "bfloat16", weights_file=str(kept_at), is_awaited=True)
    loaded = load_model(spec, CONFIG, memory, limits=EAGER)
    assert "warm_up" not in dict(loaded.engine.info.load_phases)
    assert all(heard.token_ids for heard in answers(loaded, close=True))
    assert spec.loads_same(replace(spec, is_awaited=False)), "the two specs name the same load"


@pytest.mark.long
@pytest.mark.usefixtures("unpacked")  # packed matrices cannot be used in place
@pytest.mark.parametrize(("name", "dtype"), in_turn(MODELS, ["float32", "bfloat16"]))
def test_a_model_in_place_answers_as_a_copied_one_before_and_after_its_move(
    name: str, dtype: str, tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    write_family(tmp_path, name, getattr(torch, dtype))
    expected = copied(tmp_path, memory, dtype)
    by_torch = name.startswith("deepseek")  # latent attention uses products of torch
    for path in (kept_at, None):
        loaded = load(tmp_path, path, memory, dtype)
        info = loaded.engine.info
        assert not info.mapped
        assert {"config", "fingerprint", "kv", "build", "map", "warm_up"} == {phase for phase, _ in info.load_phases}
        assert_same(answers(loaded), expected, by_torch)
        assert has_moved(loaded)
        assert_same(answers(loaded, close=True), expected, by_torch)
    again = load(tmp_path, kept_at, memory, dtype)
    assert again.engine.info.mapped
    assert again.engine.info.weights_bytes == info.weights_bytes
    assert_same(answers(again, close=True), expected, by_torch)


@pytest.mark.long
@pytest.mark.parametrize("name", EMBEDDERS)
def test_an_embedder_in_place_makes_the_same_vectors(
    name: str, tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    write_embedder(tmp_path, EMBEDDERS[name])
    loaded = load(tmp_path, kept_at, memory)
    assert isinstance(loaded.under_weights, Relocation)
    vectors = []
    for _ in range(2):
        request = submit("a", random_prompt(20, seed=4), pooling=loaded.engine.info.pooling)
        vectors.append(one(loaded.engine, request).embedding)
        assert has_moved(loaded)
    loaded.close()
    vectors.append(one(load(tmp_path, None, memory, limits=COPIED).engine, request).embedding)
    assert vectors[0] == vectors[1] == vectors[2]


@pytest.mark.long
@pytest.mark.parametrize(
    ("order", "padding", "files"),
    [
        (sorted, 0, {"model.safetensors", ""}),  # the usual order of safetensors: k, o, q, v
        (lambda names: sorted(names, key=lambda name: name.replace("q_proj", "a").replace("k_proj", "b").replace("v_proj", "c")), 0,
         {"model.safetensors"}),
        (sorted, 1, None),  # all tensors are misaligned
    ],
)  # fmt: skip
def test_what_lies_together_is_used_where_it_lies(
    order: Callable[[list[str]], list[str]],
    padding: int,
    files: set[str] | None,
    directory: Path,
    memory: KvMemory,
    kept_at: Path,
    held: threading.Event,
) -> None:
    expected = copied(directory, memory)
    write_in_order(directory, order(list(load_file(directory / "model.safetensors"))), padding)
    loaded = load(directory, kept_at, memory)
    found = {Path(place).name if place.startswith("/") else "" for place in mappings(loaded.engine)}
    assert_same(answers(loaded), expected)
    if files is None:
        assert found == {kept_at.name}
    else:
        assert found == files
        held.set()
        assert has_moved(loaded)
        assert mappings(loaded.engine) == {str(kept_at)}
        assert str(directory) not in Path("/proc/self/maps").read_text(), "the checkpoint must no longer be mapped"
        assert_same(answers(loaded), expected)
    held.set()
    loaded.close()


def test_parts_that_lie_apart_are_joined_page_by_page(
    tmp_path: Path, kept_at: Path, memory: KvMemory, held: threading.Event
) -> None:
    """The model has queries, keys and values in one matrix. They are mapped together; only pages that contain the end of one are copied."""
    directory = tmp_path / "model"
    write_llama(directory, hidden_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    expected = copied(directory, memory)
    limits = dataclasses.replace(EAGER, least_part_bytes=4096)
    loaded = load(directory, kept_at, memory, limits=limits)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(directory) in line]
    num_layers = len(loaded.engine.runner.model.layers)  # type: ignore[attr-defined]
    assert len(maps) == 1 + 3 * num_layers
    assert_same(answers(loaded), expected)
    held.set()
    assert has_moved(loaded)
    assert str(directory) not in Path("/proc/self/maps").read_text(), "the checkpoint must no longer be mapped"
    assert_same(answers(loaded, close=True), expected)
    spoil(directory, "model.layers.1.self_attn.v_proj.weight", torch.nan)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.v_proj\.weight in model\.safetensors holds NaN"):
        load(directory, None, memory)


def spoil(directory: Path, name: str, value: float) -> None:
    """Change the last value of a tensor."""
    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, directory / "new", {"format": "pt"})
    (directory / "new").rename(directory / "model.safetensors")


def test_a_checkpoint_of_several_files_is_used_where_it_lies(tmp_path: Path, kept_at: Path, memory: KvMemory) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = copied(tmp_path, memory, "bfloat16")
    loaded = load(tmp_path, kept_at, memory, "bfloat16")
    assert_same(answers(loaded), expected)
    assert has_moved(loaded)
    assert_same(answers(loaded, close=True), expected)


def test_a_type_that_is_not_stored_is_made(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    loaded = load(directory, kept_at, memory, "bfloat16")
    assert not isinstance(loaded.under_weights, Relocation)
    assert kept_at.exists()


def test_a_small_model_is_copied(directory: Path, kept_at: Path, memory: KvMemory) -> None:
    assert not isinstance(load(directory, kept_at, memory, limits=USUAL_LIMITS).under_weights, Relocation)


def test_a_network_file_system_is_not_mapped(
    directory: Path, kept_at: Path, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotlight.engine.weights.load.is_local", lambda path: False)
    assert not isinstance(load(directory, kept_at, memory).under_weights, Relocation)


@pytest.mark.parametrize(
    ("path", "expected"),
    [("/models/a", True), ("/data/a", False), ("/data/fast disk/a", True), ("/fast", True), ("/home/x", False)],
)
def test_mounted_file_systems_are_distinguished(path: str, expected: bool, tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw\n"
        "30 22 0:50 / /data rw shared:9 - nfs4 server:/data rw,vers=4.2\n"
        "31 30 254:16 / /data/fast\\040disk rw - xfs /dev/vdb rw\n"
        "32 22 0:51 / /home rw - fuse.sshfs me@there: rw\n"
    )
    assert is_local(Path(path), mounts) is expected
    assert not is_local(Path(path), tmp_path / "none")


def test_a_mount_whose_name_is_no_text_hides_no_other(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(
        b"22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        b"30 22 8:17 / /media/Caf\xe9 rw - vfat /dev/sdb rw\n"
        b"31 22 0:50 / /data/Caf\xc3\xa9 rw - nfs4 server:/data rw\n"
    )
    assert is_local(Path("/models/a"), mounts)
    assert is_local(Path(os.fsdecode(b"/media/Caf\xe9/a")), mounts)
    assert not is_local(Path("/data/Café/a"), mounts)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_a_value_that_is_no_number_is_refused_in_place_too(
    name: str, value: float, directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors[name][7, 3] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{name} in model\.safetensors holds NaN"):
        load(directory, kept_at, memory)
    assert list(kept_at.parent.iterdir()) == []


def test_a_checkpoint_that_changes_while_it_is_mapped_is_refused(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        load(directory, kept_at, memory, on_progress=change_at(directory / "model.safetensors"))
    assert list(kept_at.parent.iterdir()) == []


def test_a_checkpoint_that_changes_later_leaves_no_bundle(
    directory: Path, kept_at: Path, memory: KvMemory, held: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    loaded = load(directory, kept_at, memory)
    os.utime(directory / "model.safetensors", (1, 1))
    held.set()
    assert not has_moved(loaded)
    assert "was changed while it was read" in caplog.text
    assert list(kept_at.parent.iterdir()) == []


def test_a_checkpoint_may_be_replaced_by_renaming(
    directory: Path, kept_at: Path, memory: KvMemory, held: threading.Event
) -> None:
    expected = copied(directory, memory)
    loaded = load(directory, kept_at, memory)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] += 0.5
    save_file(tensors, directory / "new")
    (directory / "new").rename(directory / "model.safetensors")
    assert_same(answers(loaded), expected)
    held.set()
    has_moved(loaded)
    assert_same(answers(loaded, close=True), expected)


def test_sequences_that_run_while_the_model_moves_notice_nothing(
    directory: Path, kept_at: Path, memory: KvMemory, held: threading.Event
) -> None:
    requests = [submit(str(i), random_prompt(20 + i, seed=i), max_tokens=60, num_logprobs=2) for i in range(3)]
    expected = drain(load(directory, None, memory, limits=COPIED).engine, requests)
    loaded = load(directory, kept_at, memory)
    model = loaded.engine.runner.model  # type: ignore[attr-defined]
    found: dict[str, Heard] = {}
    with pytest.raises(AssertionError, match="30 steps were not enough"):
        drain(loaded.engine, requests, 30, found)
    held.set()
    assert has_moved(loaded)
    drain(loaded.engine, [], heard=found)
    assert loaded.engine.runner.model is not model  # type: ignore[attr-defined]
    for name, heard in expected.items():
        assert found[name].logprobs == heard.logprobs
    loaded.close()


def test_a_model_that_is_let_go_while_it_moves_still_gets_its_bundle(
    directory: Path, kept_at: Path, memory: KvMemory, held: threading.Event
) -> None:
    loaded = load(directory, kept_at, memory)
    loaded.close()
    held.set()
    assert not has_moved(loaded)
    assert load(directory, kept_at, memory).engine.info.mapped


@pytest.mark.long
def test_a_load_while_another_is_moving_writes_nothing_twice(
    directory: Path, kept_at: Path, memory: KvMemory, held: threading.Event
) -> None:
    expected = copied(directory, memory)
    first = load(directory, kept_at, memory)
    first.close()
    while not (partials := list(kept_at.parent.iterdir())):
        pass
    second = load(directory, kept_at, memory)
    assert not second.engine.info.mapped
    assert_same(answers(second), expected)
    assert list(kept_at.parent.iterdir()) == partials
    held.set()
    assert has_moved(second)
    assert mappings(second.engine) == {str(kept_at)}
    assert list(kept_at.parent.iterdir()) == [kept_at]
    assert_same(answers(second, close=True), expected)


def test_two_models_that_move_do_not_mix(tmp_path: Path, memory: KvMemory, held: threading.Event) -> None:
    kept, expected = [], []
    loaded = []
    for seed in range(2):
        write_llama(tmp_path / str(seed), seed=seed)
        kept.append(tmp_path / f"{seed}.weights")
        loaded.append(load(tmp_path / str(seed), kept[-1], memory))
        expected.append(answers(loaded[-1]))
    held.set()
    for seed in range(2):
        assert has_moved(loaded[seed])
        assert mappings(loaded[seed].engine) == {str(kept[seed])}
        assert_same(answers(loaded[seed]), expected[seed])


def test_a_bundle_whose_place_is_given_away_is_not_finished(
    directory: Path,
    kept_at: Path,
    memory: KvMemory,
    held: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    expected = copied(directory, memory)
    loaded = load(directory, kept_at, memory)
    # Wait until the file has its size: if it vanishes before it is locked, it is made again.
    while not (partials := [path for path in kept_at.parent.iterdir() if path.stat().st_size]):
        pass
    for path in partials:
        path.unlink()
    held.set()
    assert not has_moved(loaded)
    assert "another bundle has replaced it" in caplog.text
    assert list(kept_at.parent.iterdir()) == []
    assert_same(answers(loaded, close=True), expected)


@pytest.mark.long
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_full_file_system_ends_the_move_with_one_line(
    when: str,
    directory: Path,
    kept_at: Path,
    memory: KvMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    expected = copied(directory, memory)

    if when == "before":
        full_file_system(monkeypatch)
    else:
        file_system_that_fills_up(monkeypatch)
    loaded = load(directory, kept_at, memory)
    assert not has_moved(loaded)
    (record,) = [record for record in caplog.records if record.name.startswith("pilotlight.engine.weights")]
    assert "weights are not moved to" in record.getMessage()
    assert list(kept_at.parent.iterdir()) == []
    assert_same(answers(loaded, close=True), expected)


ANOTHER_HOST = """
import sys, threading
from pathlib import Path
from pilotlight.engine.weights.bundles.bundle_file import BundleWriter
from pilotlight.engine.weights.weight_limits import WeightLimits
from tests.engine.test_mapped_weights import CONFIG, load, make_kv_memory
write = BundleWriter.write
def stop_in_the_middle(self, start, content):
    write(self, start, content)
    if threading.current_thread().name == "relocation" and start > 4096:
        print("moving", flush=True)
        threading.Event().wait()
BundleWriter.write = stop_in_the_middle
limits = WeightLimits(in_place_from_bytes=0, move_after_s=0.0)
load(Path(sys.argv[1]), Path(sys.argv[2]), make_kv_memory(CONFIG), limits=limits)
sys.stdin.readline()
"""


@pytest.mark.process
def test_a_host_that_is_killed_while_a_model_moves_leaves_nothing_that_counts(
    directory: Path, kept_at: Path, memory: KvMemory
) -> None:
    expected = copied(directory, memory)
    command = [sys.executable, "-c", ANOTHER_HOST, str(directory), str(kept_at)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "moving\n"
        assert not kept_at.exists()
        host.send_signal(signal.SIGKILL)
    assert len(list(kept_at.parent.iterdir())) == 1, "a partial bundle must remain"
    loaded = load(directory, kept_at, memory)
    assert not loaded.engine.info.mapped
    assert has_moved(loaded)
    assert list(kept_at.parent.iterdir()) == [kept_at]
    assert_same(answers(loaded, close=True), expected)

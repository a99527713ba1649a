"""Models with matrices coded losslessly in 12 bits: bit-identical answers, less memory, and plain weights if coding gains nothing."""

import dataclasses
import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pilotlight.engine.api.protocol import Lossless, ModelSpec
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.loading.loaded_model import LoadedModel
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.weights.bundles.bundle import WeightBundleError
from pilotlight.engine.weights.bundles.bundle_file import BundleFile
from pilotlight.engine.weights.bundles.lossless import CODED, CODES, STARTS, CodedTensors, Matrix, check_coded
from pilotlight.engine.weights.loader import WeightLoader
from pilotlight.engine.weights.weight_limits import WeightLimits
from pilotlight.kernels.cpu import library
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.matrices.lossless import LosslessWeight, pack_lossless
from tests.checkpoints import write_llama
from tests.cpu_kernels import computing_with
from tests.engine.driver import drain, submit
from tests.engine.families import MODELS, PACKED, SWEPT, write_family
from tests.engine.test_in_place import COPIED, EAGER, answers, assert_same, has_moved
from tests.engine.test_mapped_weights import CONFIG

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    return make_kv_memory(CONFIG)


ANY_SIZE = dataclasses.replace(EAGER, coded_share=100.0)  # encode models and matrices of any size


def load(
    directory: Path,
    kept_at: Path | None,
    memory: KvMemory,
    mode: Lossless,
    dtype: Any = "bfloat16",
    limits: WeightLimits = ANY_SIZE,
) -> LoadedModel:
    path = None if kept_at is None else str(kept_at)
    spec = ModelSpec("tiny", str(directory), dtype, weights_file=path, lossless=mode)
    return load_model(spec, CONFIG, memory, limits=limits)


def coded_tensors(path: Path) -> list[str]:
    with BundleFile.open(path) as file:
        return [placed.spec.name for placed in file.bundle.tensors if placed.spec.name.endswith(CODES)]


@pytest.mark.long
@pytest.mark.parametrize("name", [*(name for name in MODELS if name != PACKED), *SWEPT])
def test_every_family_answers_the_same_before_and_after_its_move_and_when_it_wakes(
    name: str, tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    write_family(tmp_path, name, torch.bfloat16)
    plain = load(tmp_path, None, memory, "off")
    assert has_moved(plain)
    expected = answers(plain, close=True)
    loaded = load(tmp_path, kept_at, memory, "always")
    assert has_moved(loaded)
    assert_same(answers(loaded, close=True), expected)
    assert coded_tensors(kept_at)
    again = load(tmp_path, kept_at, memory, "always")
    assert again.engine.info.mapped
    assert_same(answers(again, close=True), expected)


def test_a_model_that_is_let_go_while_its_weights_are_looked_through_still_gets_its_bundle(
    tmp_path: Path, kept_at: Path, memory: KvMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16)
    held, survey = threading.Event(), CodedTensors.survey

    def held_back(tensors: CodedTensors) -> Iterator[str]:
        assert held.wait(60)
        yield from survey(tensors)

    monkeypatch.setattr(CodedTensors, "survey", held_back)
    loaded = load(tmp_path, kept_at, memory, "always")
    loaded.close()
    held.set()
    assert not has_moved(loaded)
    assert load(tmp_path, kept_at, memory, "always").engine.info.mapped


@pytest.mark.long
def test_sequences_under_way_while_the_weights_move_notice_nothing(tmp_path: Path, memory: KvMemory) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16)

    def heard(mode: Lossless, *, waits: bool) -> Any:
        loaded = load(tmp_path, None, memory, mode)
        salt = os.urandom(8)
        requests = [
            submit(f"s{i}", list(range(2, 20 + i)), salt=salt, max_tokens=30, seed=i, num_logprobs=3) for i in range(4)
        ]
        if waits:
            assert has_moved(loaded)
        found = {key: (one.token_ids, one.logprobs) for key, one in drain(loaded.engine, requests).items()}
        assert has_moved(loaded)
        loaded.close()
        return found

    assert heard("always", waits=False) == heard("off", waits=True) == heard("always", waits=True)


def test_a_woken_model_takes_less_memory_and_says_how_much_it_saves(
    tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16, hidden_size=384, intermediate_size=512, vocab_size=1000)
    first = load(tmp_path, kept_at, memory, "always", limits=EAGER)
    assert first.engine.info.saved_bytes == 0
    assert has_moved(first)
    first.close()
    info = load(tmp_path, kept_at, memory, "always", limits=EAGER).engine.info
    plain_bytes = first.engine.info.weights_bytes
    assert info.weights_bytes + info.saved_bytes == plain_bytes
    assert 0.22 < info.saved_bytes / plain_bytes < 0.25
    assert kept_at.stat().st_size < 0.8 * plain_bytes


def test_a_model_that_is_too_small_for_its_checkpoints_pages_is_coded_at_its_first_load(
    tmp_path: Path, kept_at: Path, memory: KvMemory
) -> None:
    limits = dataclasses.replace(COPIED, coded_share=100.0)
    write_llama(tmp_path, dtype=torch.bfloat16)
    expected = answers(load(tmp_path, None, memory, "off", limits=limits), close=True)
    first = load(tmp_path, kept_at, memory, "always", limits=limits)
    assert coded_tensors(kept_at)
    assert_same(answers(first, close=True), expected)
    again = load(tmp_path, kept_at, memory, "always", limits=limits)
    assert again.engine.info.mapped
    assert_same(answers(again, close=True), expected)


@pytest.mark.long
def test_what_was_kept_for_another_choice_is_made_again(tmp_path: Path, kept_at: Path, memory: KvMemory) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16)
    for mode, is_coded in (("always", True), ("off", False), ("always", True)):
        loaded = load(tmp_path, kept_at, memory, mode)
        assert not loaded.engine.info.mapped
        assert has_moved(loaded)
        loaded.close()
        assert bool(coded_tensors(kept_at)) == is_coded


@pytest.mark.long
def test_auto_measures_once_and_obeys(tmp_path: Path, kept_at: Path, memory: KvMemory) -> None:
    write_llama(tmp_path / "model", dtype=torch.bfloat16)
    if library.loaded is None:
        pytest.skip("without the C library nothing is measured")
    unmeasured = Path(shutil.copy(library.loaded.path, tmp_path))
    with computing_with(Library(unmeasured)):
        assert not loads_mapped(tmp_path / "model", kept_at, memory)
        (file,) = tmp_path.glob("*.json")
        inode, found = file.stat().st_ino, json.loads(file.read_bytes())
        assert bool(coded_tensors(kept_at)) == found["is_faster"]
        assert loads_mapped(tmp_path / "model", kept_at, memory)
        assert file.stat().st_ino == inode, "the speed was measured again"
        file.write_text(json.dumps({**found, "is_faster": not found["is_faster"]}))
        assert not loads_mapped(tmp_path / "model", kept_at, memory)
        assert bool(coded_tensors(kept_at)) != found["is_faster"]


def loads_mapped(directory: Path, kept_at: Path, memory: KvMemory) -> bool:
    """Load and unload in the mode auto; return True if a bundle was mapped, which otherwise is written."""
    loaded = load(directory, kept_at, memory, "auto")
    assert loaded.engine.info.mapped or has_moved(loaded)
    loaded.close()
    return loaded.engine.info.mapped


def test_what_is_computed_in_fp32_is_left_alone_and_said(
    tmp_path: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, dtype=torch.float32)
    caplog.set_level(logging.INFO)
    loaded = load(tmp_path, kept_at, memory, "always", "float32")
    assert has_moved(loaded)
    loaded.close()
    assert not coded_tensors(kept_at)
    assert any("lossless = always has no effect" in message for message in caplog.messages)


def test_a_quantized_checkpoint_is_left_alone_and_said(
    tmp_path: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    write_family(tmp_path, PACKED, torch.bfloat16)
    caplog.set_level(logging.INFO)
    expected = answers(load(tmp_path, None, memory, "off"), close=True)
    left = load(tmp_path, None, memory, "always")
    assert_same(answers(left, close=True), expected)
    assert left.engine.info.saved_bytes == 0
    assert sum("lossless = always has no effect" in message for message in caplog.messages) == 1


def test_a_matrix_that_does_not_shrink_stays_plain() -> None:
    random = torch.randint(-(1 << 15), 1 << 15, (64, 512)).to(torch.int16).view(torch.bfloat16)
    tensors = {
        "random": random,
        "narrow": torch.randn(64, 40).to(torch.bfloat16),
        "fp32": torch.randn(64, 512),
        "zeros": torch.zeros(64, 512, dtype=torch.bfloat16),
        "good": torch.randn(64, 512).to(torch.bfloat16),
        "experts": torch.randn(4, 12, 512).to(torch.bfloat16),  # two experts would share a palette
    }
    matrices = {name: Matrix(tensor.shape[-1]) for name, tensor in tensors.items()} | {"experts": Matrix(512, 4)}
    coded = CodedTensors(tensors, matrices, 0.9)
    assert list(coded.survey()) == list(tensors)
    assert [spec.name.removesuffix(CODES) for spec in coded.specs if spec.name.endswith(CODES)] == ["zeros", "good"]
    for spec in coded.specs:
        content = torch.cat([piece.reshape(-1) for piece in coded.pieces(spec.name)])
        assert content.nbytes == spec.num_bytes
    assert torch.equal(content.view(4, 12, 512), tensors["experts"])


def test_pieces_of_a_large_matrix_are_the_whole_ones_bytes() -> None:
    plain = torch.randn(203, 384).to(torch.bfloat16)
    plain[17, 3], plain[202, 383] = 1e30, 1e-30
    coded, whole = CodedTensors({"m": plain}, {"m": Matrix(384)}, 100.0, 20_000), pack_lossless(plain)
    list(coded.survey())
    for spec, part in zip(coded.specs, whole.parts, strict=True):
        pieces = list(coded.pieces(spec.name))
        assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), part.reshape(-1))
    assert len(list(coded.pieces("m" + CODES))) == 5


def test_starts_that_lead_out_of_their_escapes_are_refused() -> None:
    weight = pack_lossless(torch.randn(24, 256).to(torch.bfloat16))
    check_coded("m", weight)
    for bad in ([0, 5, 3], [-1, 0, 0], [0, 0, 9], [1, 1, 1]):
        starts = torch.zeros_like(weight.starts)
        starts[: len(bad)] = torch.tensor(bad)
        starts[len(bad) :] = bad[-1]
        with pytest.raises(WeightBundleError, match="~starts"):
            check_coded("m", LosslessWeight(weight.codes, weight.palettes, starts, weight.escapes[:1], 256))


def test_a_bundle_in_memory_whose_starts_were_spoilt_is_made_again(
    tmp_path: Path, kept_at: Path, memory: KvMemory, caplog: pytest.LogCaptureFixture
) -> None:
    write_llama(tmp_path, dtype=torch.bfloat16)
    loaded = load(tmp_path, kept_at, memory, "always")
    expected = answers(loaded)
    assert has_moved(loaded)
    loaded.close()
    with BundleFile.open(kept_at) as file:
        placed = next(placed for placed in file.bundle.tensors if placed.spec.name.endswith(STARTS))
        assert file.bundle.identity.dtype.endswith(CODED)
    with kept_at.open("r+b") as opened:
        opened.seek(placed.start)
        opened.write(b"\x7f" * 4)
    again = load(tmp_path, kept_at, memory, "always")
    assert not again.engine.info.mapped
    assert_same(answers(again, close=True), expected)
    assert any("do not match" in message for message in caplog.messages)


def test_only_a_bundle_is_looked_at_for_codes() -> None:
    class Everything(dict[str, str]):
        def __contains__(self, name: object) -> bool:
            return True

    storage: Any = Everything()
    loader = WeightLoader(storage, torch.bfloat16, torch.device("cpu"))
    assert loader._coded("m.weight", 8, Matrix(128)) is None
    assert loader.matrices == {"m.weight": Matrix(128)}

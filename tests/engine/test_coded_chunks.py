"""Files of `pack --lossless`: a third smaller for trained weights, bit-exact however they are read, and errors name the damaged chunk."""

import dataclasses
import hashlib
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.loading.kv_memory import KvMemory, make_kv_memory
from pilotlight.engine.planning.model_plan import planned_weights_bytes
from pilotlight.engine.tools.packing import Report, pack_directory
from pilotlight.engine.weights import storage
from pilotlight.engine.weights.bundles import packed
from pilotlight.engine.weights.bundles.bundle import (
    BundleIdentity,
    CheckpointFacts,
    TensorSpec,
    WeightBundleError,
    lay_out,
)
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, new_bundle
from pilotlight.engine.weights.bundles.coded_chunks import decode_chunk, encode_chunk
from pilotlight.engine.weights.bundles.packed import CodedTensorLimits, verify
from pilotlight.kernels.matrices.lossless import pack_lossless as code_matrix
from pilotlight.kernels.matrices.planes import join_planes, split_planes
from tests.checkpoints import write_llama
from tests.cpu_kernels import BOTH, computing_with
from tests.engine import test_lossless_weights as lossless_weights
from tests.engine.families import MODELS, PACKED, write_family
from tests.engine.test_in_place import COPIED, answers, assert_same, has_moved
from tests.engine.test_lossless_weights import coded_tensors
from tests.engine.test_mapped_weights import CONFIG

pytestmark = pytest.mark.cpu_only
FEW = ["llama, biased", "mixtral, two of five experts"]
ANY_SIZE = CodedTensorLimits(512, most_share=100.0)  # even small matrices are coded
ALL_VALUES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.fixture(scope="module")
def memory() -> KvMemory:
    return make_kv_memory(CONFIG)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small chunks, so that a matrix has several."""
    for module in (packed, storage, "pilotlight.engine.weights.bundles.bundle"):
        monkeypatch.setattr(f"{getattr(module, '__name__', module)}.CHUNK_VALUES", 1000)


def pack_lossless(directory: Path, out: Path, limits: CodedTensorLimits = ANY_SIZE) -> Path:
    return pack_directory(directory, out, "bfloat16", Report(), is_lossless=True, limits=limits)


load = partial(lossless_weights.load, limits=dataclasses.replace(COPIED, coded_share=100.0))


def come_back(values: torch.Tensor) -> bool:
    into = torch.empty_like(values)
    decode_chunk(memoryview(encode_chunk(values)), into)
    return torch.equal(into.view(torch.int16), values.view(torch.int16))


@pytest.mark.parametrize("library", BOTH)
def test_all_65536_values_come_back_in_any_order(library: str) -> None:
    with computing_with(library):
        for values in (ALL_VALUES, ALL_VALUES[torch.randperm(1 << 16)], ALL_VALUES[:1]):
            assert come_back(values)


@settings(max_examples=40)
@given(st.integers(0, 1 << 32), st.integers(1, 5000), st.sampled_from(["any", "few", "one", "trained"]))
def test_whatever_the_bits_are_they_come_back(seed: int, count: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 15), 1 << 15, (count,), generator=generator, dtype=torch.int16)
    if kind == "few":
        words &= 0x0780
    elif kind == "one":
        words[:] = words[0].clone()
    elif kind == "trained":
        words = torch.randn(count, generator=generator).to(torch.bfloat16).view(torch.int16)
    assert come_back(words.view(torch.bfloat16))


@pytest.mark.slow
def test_a_billion_values_come_back_from_chunks_and_from_12_bits() -> None:
    generator, num_checked = torch.Generator().manual_seed(0), 0
    while num_checked < 10**9:
        words = torch.randint(-(1 << 15), 1 << 15, (1 << 20,), generator=generator, dtype=torch.int16)
        trained = (torch.randn(1 << 20, generator=generator) * 0.02).to(torch.bfloat16).view(torch.int16)
        # Random bits; trained values; trained values with some random bits; and values with mostly one exponent.
        for kind in (
            words,
            trained,
            torch.where(words > 32_000, words, trained),
            torch.where(words > 32_700, words, words & 0x7F),
        ):
            values = kind.view(torch.bfloat16)
            assert come_back(values)
            again = code_matrix(values.view(1024, 1024)).unpack(torch.bfloat16)
            assert torch.equal(again.view(-1).view(torch.int16), kind)
            num_checked += kind.numel()


def test_a_chunk_comes_close_to_what_its_exponents_entropy_allows() -> None:
    values = (torch.randn(1 << 19, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
    share = torch.bincount(split_planes(values)[: 1 << 19].long(), minlength=256) / (1 << 19)
    entropy = float(-(share[share > 0] * share[share > 0].log2()).sum())
    assert 8 * len(encode_chunk(values)) / (1 << 19) < 8 + 1.03 * entropy


def test_planes_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="planes"):
        join_planes(torch.zeros(4, dtype=torch.bfloat16), bytes(7))


def test_a_damaged_chunk_and_one_of_another_length_are_refused() -> None:
    values = torch.randn(5000).to(torch.bfloat16)
    chunk = encode_chunk(values)
    into = torch.empty_like(values)
    for at in range(0, len(chunk), 97):
        flipped = bytearray(chunk)
        flipped[at] ^= 0x10
        with pytest.raises(CheckpointError):
            decode_chunk(memoryview(flipped), into)
    for cut in (0, 3, len(chunk) // 2, len(chunk) - 1):
        with pytest.raises(CheckpointError):
            decode_chunk(memoryview(chunk[:cut]), into)
    for other in (4999, 4000):
        with pytest.raises(CheckpointError, match="does not hold"):
            decode_chunk(memoryview(chunk), into[:other])


def packed_both_ways(tmp_path: Path, name: str) -> tuple[Path, Path]:
    write_family(tmp_path / "model", name, torch.bfloat16)
    plain = pack_directory(tmp_path / "model", tmp_path / "plain", "bfloat16", Report())
    coded = pack_lossless(tmp_path / "model", tmp_path / "coded")
    return plain, coded


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FEW)) for name in MODELS if name != PACKED]
)
def test_every_familys_bundle_comes_out_again_byte_for_byte(name: str, tmp_path: Path) -> None:
    plain, coded = packed_both_ways(tmp_path, name)
    with BundleFile.open(coded) as file:
        assert file.bundle.coded
    verify(coded, lambda done, total: None)
    again = pack_directory(tmp_path / "coded", tmp_path / "again", "auto", Report())
    assert again.name == plain.name
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(plain.read_bytes()).digest()


@pytest.mark.long
@pytest.mark.parametrize("name", FEW)
def test_a_model_in_coded_chunks_answers_the_same_in_any_memory(name: str, tmp_path: Path, memory: KvMemory) -> None:
    _, coded = packed_both_ways(tmp_path, name)
    kept_at = tmp_path / "memory" / "tiny.weights"
    kept_at.parent.mkdir()
    expected = answers(load(tmp_path / "plain", None, memory, "off", "auto"), close=True)
    for kept, mode in (
        (None, "off"),
        (None, "always"),
        (kept_at, "off"),
        (kept_at, "off"),
        (kept_at, "always"),
        (kept_at, "always"),
    ):
        loaded = load(tmp_path / "coded", kept, memory, mode, "auto")
        assert loaded.engine.info.dtype == "bfloat16"
        if mode == "always" and not loaded.engine.info.mapped:
            assert has_moved(loaded)
        assert_same(answers(loaded, close=True), expected)
    assert coded_tensors(kept_at)
    assert planned_weights_bytes(tmp_path / "coded", "auto", on_cpu=True) > coded.stat().st_size // 2
    assert pack_lossless(tmp_path / "model", tmp_path / "coded") == coded


def test_damage_is_named_by_its_chunk(tmp_path: Path, memory: KvMemory) -> None:
    write_llama(tmp_path / "model", dtype=torch.bfloat16)
    path = pack_lossless(tmp_path / "model", tmp_path / "coded")
    with BundleFile.open(path) as file:
        placed = next(placed for placed in file.bundle.tensors if placed.spec.name.endswith("~1"))
    whole = bytearray(path.read_bytes())
    for at in (placed.start, placed.start + 40, placed.end - 1):
        flipped = bytearray(whole)
        flipped[at] ^= 4
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=f"chunk {placed.spec.name} in {path.name} cannot be used"):
            load(tmp_path / "coded", None, memory, "off", "auto")
        with pytest.raises(CheckpointError, match=f"is damaged in {placed.spec.name}"):
            verify(path, lambda done, total: None)
    path.write_bytes(whole[: placed.start + 5])
    with pytest.raises(CheckpointError, match=f"it is cut off in {placed.spec.name}"):
        load(tmp_path / "coded", None, memory, "off", "auto")


def test_what_cannot_be_packed_so_is_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="is packed as float32: --lossless is for plain weights in bfloat16"):
        pack_directory(tmp_path / "model", tmp_path / "packed", "float32", Report(), is_lossless=True)
    write_llama(tmp_path / "halves", dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"is packed as float32: .* leave it out, or round them with --dtype"):
        pack_directory(tmp_path / "halves", tmp_path / "packed", "auto", Report(), is_lossless=True)
    write_family(tmp_path / "quantized", PACKED, torch.bfloat16)
    with pytest.raises(
        CheckpointError, match=r"is quantized: --lossless is for plain weights in bfloat16; leave it out$"
    ):
        pack_directory(tmp_path / "quantized", tmp_path / "packed", "bfloat16", Report(), is_lossless=True)
    assert not (tmp_path / "packed").exists()
    pack_lossless(tmp_path / "model", tmp_path / "packed")
    for dtype, is_lossless in (("auto", True), ("float32", False)):
        with pytest.raises(CheckpointError, match="is packed already"):
            pack_directory(tmp_path / "packed", tmp_path / "again", dtype, Report(), is_lossless)
    assert not (tmp_path / "again").exists()


def test_a_tensor_that_does_not_shrink_stays_as_it_is(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", dtype=torch.bfloat16)
    path = pack_lossless(tmp_path / "model", tmp_path / "coded", CodedTensorLimits(512, most_share=0.0))
    verify(path, lambda done, total: None)
    with BundleFile.open(path) as file:
        assert not file.bundle.coded


@pytest.mark.parametrize("num_chunks", [2, 3, 4])
def test_chunks_that_do_not_make_up_their_tensor_are_refused(num_chunks: int, tmp_path: Path) -> None:
    chunks = [TensorSpec(f"a~{i}", "U8", (400,)) for i in range(num_chunks)]
    identity, facts = BundleIdentity("llama", "bfloat16", "config", "source"), CheckpointFacts(2500, ("BF16",))
    with new_bundle(tmp_path / "coded", lay_out(identity, facts, chunks, coded={"a": (5, 500)})):
        pass
    complete = num_chunks == 3  # chunks of 1000 values
    refusal = pytest.raises(WeightBundleError, match="does not have the chunks of shape")
    with nullcontext() if complete else refusal, BundleFile.open(tmp_path / "coded"):
        pass

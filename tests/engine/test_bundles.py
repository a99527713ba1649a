"""Bundle files: they are read back as written, other readers of safetensors understand them, and every damage is noticed."""

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from pilotlight.engine.weights.bundles.bundle import (
    Bundle,
    BundleIdentity,
    CheckpointFacts,
    TensorSpec,
    WeightBundleError,
    content_digest,
    encode_header,
    encode_seal,
    lay_out,
    read_bundle,
)
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, new_bundle
from pilotlight.engine.weights.filling import fill
from pilotlight.engine.weights.storage import BundleMemory, BundleStorage, on_device
from pilotlight.engine.weights.tensor_bytes import DTYPES, as_bytes
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE
from tests.engine.test_filling import LateDevice
from tests.full_disk import files_of_at_most

IDENTITY = BundleIdentity("LlamaForCausalLM", "float32", "c0ffee", "5eed")
FACTS = CheckpointFacts(1234, ("BF16", "F32"))
WANTED = (
    TensorSpec("norm", "F32", (7,)),
    TensorSpec("embedding", "BF16", (300, 512)),
    TensorSpec("bytes", "U8", (3, 5)),
)
ROOT = Path(__file__).parents[2]


def write(path: Path, bundle: Bundle) -> dict[str, torch.Tensor]:
    """Write a bundle filled with counting numbers; return its tensors."""
    written = {}
    with new_bundle(path, bundle) as new:
        for place in bundle.tensors:
            wanted = place.spec
            numbers = torch.arange(math.prod(wanted.shape)) % 251
            written[wanted.name] = numbers.to(DTYPES[wanted.dtype]).view(wanted.shape)
            new.write(place.start, as_bytes(written[wanted.name]))
    return written


def test_a_bundle_is_read_back_and_is_an_ordinary_safetensors_file(tmp_path: Path) -> None:
    bundle = lay_out(IDENTITY, FACTS, WANTED)
    written = write(tmp_path / "a", bundle)
    with BundleFile.open(tmp_path / "a") as file:
        assert file.bundle == bundle
        mapped = BundleMemory(file.map(), file.bundle)
    by_everybody = load_file(tmp_path / "a")
    for place in bundle.tensors:
        name = place.spec.name
        assert torch.equal(mapped.tensor(place), written[name])
        assert torch.equal(by_everybody[name], written[name])


def test_a_device_gets_each_tensor_from_the_file_through_its_buffers(tmp_path: Path) -> None:
    """CUDA loads this way, as it cannot use files in place."""
    bundle = lay_out(IDENTITY, FACTS, WANTED)
    written = write(tmp_path / "a", bundle)
    device = LateDevice()
    with BundleFile.open(tmp_path / "a") as file:
        storage = BundleStorage(file.bundle, on_device(torch.device("cpu")), file.path)
        taken = {name: storage.take(name, tensor.shape, tensor.dtype) for name, tensor in written.items()}
        jobs = [
            job._replace(make=lambda into, staged: into.copy_(staged)) for job in storage.jobs
        ]  # through a buffer, not directly into host memory
        for tensor in taken.values():
            tensor.zero_()  # a fake device has finite values before its copies, which follow later
        fill(jobs, copier=device)
    assert device.num_copies >= len(written)
    assert all(torch.equal(taken[name], tensor) for name, tensor in written.items())


def test_large_tensors_begin_on_a_page_and_others_on_a_cache_line() -> None:
    places = lay_out(IDENTITY, FACTS, WANTED).tensors
    assert [place.start % 64 for place in places] == [0, 0, 0]
    assert places[1].start % 4096 == 0


dtypes = st.sampled_from(["F32", "BF16", "U8"])
shapes = st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(dtypes, shapes), min_size=1, max_size=12), st.booleans())
def test_any_layout_survives_its_header(tensors: list[tuple[str, tuple[int, ...]]], with_checksums: bool) -> None:
    wanted = [TensorSpec(f"layers.{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)]
    bundle = lay_out(IDENTITY, FACTS, wanted, with_checksums)
    header = encode_header(bundle)
    assert len(header) == bundle.tensors[0].start
    fd = os.memfd_create("bundle")
    try:
        os.ftruncate(fd, bundle.size)
        os.pwrite(fd, header, 0)
        os.pwrite(fd, encode_seal(header), bundle.size - 32)
        assert read_bundle(fd) == bundle
    finally:
        os.close(fd)


def test_two_copies_of_a_checkpoint_have_one_name_and_two_contents_have_two() -> None:
    bundle = lay_out(IDENTITY, FACTS, WANTED, with_checksums=True)
    elsewhere = bundle._replace(identity=IDENTITY._replace(source="another copy"))
    changed = bundle._replace(checksums=dict(bundle.checksums) | {"norm": "1" * 32})
    assert content_digest(bundle) == content_digest(elsewhere) != content_digest(changed)


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, -33, -1])
def test_a_bundle_that_was_cut_off_is_refused(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "a"
    write(path, lay_out(IDENTITY, FACTS, WANTED))
    size = path.stat().st_size
    os.truncate(path, int(size * keep) if 0 < keep < 1 else int(keep) % size)
    with pytest.raises(WeightBundleError, match="cut off"):
        BundleFile.open(path)


def test_a_bundle_that_has_grown_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, lay_out(IDENTITY, FACTS, WANTED))
    with path.open("ab") as file:
        file.write(bytes(64))
    with pytest.raises(WeightBundleError, match="cut off, or its header was changed"):
        BundleFile.open(path)


def test_any_flipped_bit_of_the_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    bundle = lay_out(IDENTITY, FACTS, WANTED)
    write(path, bundle)
    whole = path.read_bytes()
    for at in [*range(0, bundle.tensors[0].start, 37), bundle.size - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with pytest.raises(WeightBundleError):
            BundleFile.open(path)


def test_another_version_and_another_format_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write(path, lay_out(IDENTITY, FACTS, WANTED))
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"version":"1"', b'"version":"9"'))
    with pytest.raises(WeightBundleError, match="it has version 9; this engine reads 1"):
        BundleFile.open(path)
    path.write_bytes(whole.replace(b"pilotlight.bundle", b"anothers.weights1"))
    with pytest.raises(WeightBundleError, match=r"format 'anothers\.weights1'"):
        BundleFile.open(path)


def test_a_plain_safetensors_file_is_no_bundle(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "U8", "shape": [40], "data_offsets": [0, 40]}}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(40))
    with pytest.raises(WeightBundleError, match=r"its header is damaged or not a bundle's: it has no '__metadata__'$"):
        BundleFile.open(tmp_path / "a")


WRITER = """
import sys, time
from pathlib import Path
from tests.engine.test_bundles import FACTS, IDENTITY, WANTED
from pilotlight.engine.weights.bundles.bundle import lay_out
from pilotlight.engine.weights.bundles.bundle_file import new_bundle
with new_bundle(Path(sys.argv[1]), lay_out(IDENTITY, FACTS, WANTED)) as new:
    new.write(5000, memoryview(bytes(100_000)))
    print("half way", flush=True)
    time.sleep(60)
"""


@pytest.mark.process
def test_a_writer_that_is_killed_leaves_nothing_that_the_next_one_keeps(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], cwd=ROOT, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"half way\n"
        (partial,) = tmp_path.iterdir()
        assert partial.name.endswith(".partial")
        # A partial file stays while its writer lives.
        write(path, lay_out(IDENTITY, FACTS, WANTED[:1]))
        assert sorted(tmp_path.iterdir()) == sorted([path, partial])
        writer.send_signal(signal.SIGKILL)
    write(path, lay_out(IDENTITY, FACTS, WANTED))
    assert list(tmp_path.iterdir()) == [path]
    with BundleFile.open(path) as file:
        assert file.bundle.tensors


def test_a_failure_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), new_bundle(tmp_path / "a", lay_out(IDENTITY, FACTS, WANTED)):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of half a MiB; skip the test without the right to."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system")
    yield tmp_path
    subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.process
def test_a_file_system_that_is_too_small_is_refused_with_both_numbers(small_file_system: Path) -> None:
    bundle = lay_out(IDENTITY, FACTS, [TensorSpec("large", "U8", (700_000,))])
    with (
        pytest.raises(WeightBundleError, match=r"the weights take 0\.7 MiB and .* has 0\.5 MiB free"),
        new_bundle(small_file_system / "a", bundle),
    ):
        raise AssertionError("it was let in")
    assert list(small_file_system.iterdir()) == []


@pytest.mark.process
def test_a_file_system_that_fills_up_meanwhile_ends_in_an_error_not_in_a_signal(small_file_system: Path) -> None:
    bundle = lay_out(IDENTITY, FACTS, [TensorSpec("large", "U8", (400_000,))])
    with pytest.raises(WeightBundleError, match="give it more room"):
        _write_beside_another(small_file_system, bundle)
    assert [path.name for path in small_file_system.iterdir()] == ["other"]


@pytest.mark.process
def test_a_bundle_above_the_limit_of_a_files_size_is_refused_like_one_without_room(tmp_path: Path) -> None:
    bundle = lay_out(IDENTITY, FACTS, [TensorSpec("large", "U8", (400_000,))])
    with files_of_at_most(100_000), pytest.raises(WeightBundleError, match="give it more room"):
        write(tmp_path / "a", bundle)
    assert list(tmp_path.iterdir()) == []


def _write_beside_another(directory: Path, bundle: Bundle) -> None:
    with new_bundle(directory / "a", bundle) as new:
        (directory / "other").write_bytes(bytes(300_000))
        new.write(100, memoryview(bytes(390_000)))


@pytest.mark.parametrize("num_pages", [None, 1, 0], ids=["as the system has them", "one huge page", "none"])
def test_a_bundle_in_huge_pages_has_the_same_bytes(
    num_pages: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    if num_pages is not None:
        monkeypatch.setattr(pages, "make_huge", lambda *where: given.append(1) or len(given) <= num_pages)
    # the header, tensors of three and a half pages, and one across a page boundary
    wanted = [*WANTED, TensorSpec("large", "U8", (5 * HUGE_PAGE // 2,)), TensorSpec("last", "U8", (HUGE_PAGE,))]
    bundle = lay_out(IDENTITY, FACTS, wanted)
    plain, huge = tmp_path / "plain", tmp_path / "huge"
    written = write(plain, bundle)
    with new_bundle(huge, bundle) as new:
        for place in bundle.tensors:
            content = as_bytes(written[place.spec.name])
            for start in range(0, len(content), 1_000_000):
                new.write_huge(place.start + start, content[start : start + 1_000_000])
    assert huge.read_bytes() == plain.read_bytes()
    assert len(given) == (0 if num_pages is None else num_pages + 1)


def test_a_mapping_outlives_its_file_and_cannot_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "a"
    bundle = lay_out(IDENTITY, FACTS, WANTED)
    written = write(path, bundle)
    with BundleFile.open(path) as file:
        memory = file.map()
    if sys.platform.startswith("linux"):
        maps = Path("/proc/self/maps").read_text().splitlines()
        assert [line.split()[1] for line in maps if line.endswith(str(path))] == ["r--s"]
    path.unlink()
    assert torch.equal(BundleMemory(memory, bundle).tensor(bundle.tensors[1]), written["embedding"])

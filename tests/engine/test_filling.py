"""Reading weights: by several threads, through staging buffers of a device, and with little memory beside the weights."""

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.checkpoint import index_checkpoint
from pilotlight.engine.weights.filling import WrittenChunk, check_written, cut, fill
from pilotlight.engine.weights.relocation import HugePages
from pilotlight.engine.weights.staging import Staging, Waitable, copy
from pilotlight.engine.weights.storage import Job
from pilotlight.engine.weights.weight_limits import WeightLimits
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.finite import total_of
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE

ROOT = Path(__file__).parents[2]
SMALL = 1000  # bytes of a chunk
AT_ONCE = WeightLimits(move_after_s=0.0, move_share=1.0)


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    made = {f"t{i}": torch.randn(37 + i, 23, generator=generator).bfloat16() for i in range(9)}
    made["u"] = torch.randint(0, 256, (5, 7, 9), dtype=torch.uint8, generator=generator)
    save_file(made, tmp_path / "model.safetensors")
    return made


def transposed(into: torch.Tensor, stored: torch.Tensor) -> None:
    into.copy_(stored.transpose(1, 2))


class LateDevice:
    """A fake device that copies late: a copy has the content of the buffer at the time of the copy, not of the call."""

    num_buffers = 2

    def __init__(self) -> None:
        self.num_copies = self.most_under_way = self._under_way = 0
        self._lock = threading.Lock()

    def in_thread(self) -> AbstractContextManager[object]:
        return nullcontext()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def begin(self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Callable[..., object]) -> Waitable:
        with self._lock:
            self.num_copies += 1
            self._under_way += 1
            self.most_under_way = max(self.most_under_way, self._under_way)
        return Mark(lambda: make(into, *staged), self._end)

    def _end(self) -> None:
        with self._lock:
            self._under_way -= 1


class Mark:
    """A copy that is made when it is waited for."""

    def __init__(self, work: Callable[[], object], end: Callable[[], None]) -> None:
        self._todo = [work, end]

    def wait(self) -> None:
        while self._todo:
            self._todo.pop(0)()


@pytest.mark.parametrize("device", [None, LateDevice()])
def test_every_piece_reaches_its_place(
    device: LateDevice | None, tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    stored = index_checkpoint(tmp_path)
    # A real device checks values after its copies; here the copies are late, and zeros are checked.
    into = {name: torch.zeros(tensor.shape, dtype=torch.float32) for name, tensor in tensors.items() if name != "u"}
    into["t3"] = torch.empty(tensors["t3"].shape, dtype=torch.bfloat16)  # the stored type, without conversion
    turned = torch.empty(5, 9, 7, dtype=torch.uint8)
    jobs = [Job(name, (stored[name],), tensor) for name, tensor in into.items()]
    if device is not None:
        jobs = [job for job in jobs if job.into.dtype == torch.float32]
    worked: list[int] = []
    fill([*jobs, Job("u", (stored["u"],), turned, transposed)], [lambda: worked.append(1)], None, None, device, SMALL)
    for job in jobs:
        assert torch.equal(job.into, tensors[job.name].to(job.into.dtype)), job.name
    assert torch.equal(turned, tensors["u"].transpose(1, 2))
    assert worked == [1]
    assert device is None or (device.num_copies > 10 and device.most_under_way >= 2)


def test_a_buffer_is_written_again_only_when_the_device_has_read_it() -> None:
    staging = Staging(LateDevice())
    into = [torch.empty(4, dtype=torch.uint8) for _ in range(9)]
    for i, tensor in enumerate(into):
        staged = staging.next(4)[:4].fill_(i)
        staging.send(tensor, [staged], copy)
    staging.wait()
    assert [tensor.tolist() for tensor in into] == [[i] * 4 for i in range(9)]


def test_the_first_failure_ends_all_threads(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = index_checkpoint(tmp_path)

    def fail(into: torch.Tensor, source: torch.Tensor) -> None:
        raise ZeroDivisionError

    jobs = [Job(name, (stored[name],), torch.empty(t.shape), fail) for name, t in tensors.items() if name != "u"]
    with pytest.raises(ZeroDivisionError):
        fill(jobs, chunk_bytes=SMALL)
    assert not [thread for thread in threading.enumerate() if thread.name == "weights"]


def test_a_file_that_is_cut_off_while_it_is_read_is_an_error(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = index_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:5000])
    jobs: list[Job] = [Job(name, (stored[name],), torch.empty(t.shape)) for name, t in tensors.items() if name != "u"]
    with pytest.raises(CheckpointError, match=r"model\.safetensors was cut off while it was read"):
        fill(jobs, chunk_bytes=SMALL)


PEAK = """
import sys
from pathlib import Path
from pilotlight.engine.loading.kv_memory import make_kv_memory
from pilotlight.engine.loading.loading import load_model
from pilotlight.engine.api.protocol import HostConfig, ModelSpec

config = HostConfig(kv_bytes=16 << 20, threads=1)
memory = make_kv_memory(config)
tiny, large, kept = sys.argv[1], sys.argv[2], sys.argv[3] or None
load_model(ModelSpec("tiny", tiny, "bfloat16"), config, memory).close()  # what torch takes at its first step
def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) << 10
def now():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) << 10
before = now()
loaded = load_model(ModelSpec("large", large, "bfloat16", weights_file=kept), config, memory)
print(peak() - before, loaded.engine.info.weights_bytes)
loaded.close()
"""


@pytest.fixture(scope="module")
def tiny_and_large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    from tests.checkpoints import write_llama

    folder = tmp_path_factory.mktemp("checkpoints")
    write_llama(folder / "tiny")
    # Stored in fp32 and computed in bf16, so that every tensor is converted.
    write_llama(
        folder / "large", hidden_size=1024, intermediate_size=4096, num_hidden_layers=5, vocab_size=20_000, num_attention_heads=8,
        num_key_value_heads=2, head_dim=128, dtype=torch.float32,
    )  # fmt: skip
    return folder / "tiny", folder / "large"


@pytest.mark.process
@pytest.mark.cpu_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("shared", [False, True])
def test_a_load_takes_the_weights_memory_and_little_more(
    shared: bool, tiny_and_large: tuple[Path, Path], tmp_path: Path
) -> None:
    kept = str(tmp_path / "kept") if shared else ""
    command = [sys.executable, "-c", PEAK, *map(str, tiny_and_large), kept]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, weights = map(int, done.stdout.split())
    assert weights > 180 << 20
    assert taken <= weights + (64 << 20)


def test_weights_are_the_same_in_huge_pages(tmp_path: Path) -> None:
    memory = pages.small(3 * HUGE_PAGE + 4096)
    content = torch.randint(0, 256, memory.shape, dtype=torch.uint8)
    memory.copy_(content)
    moving = HugePages(memory, (), AT_ONCE)
    assert moving.wait(60)
    assert torch.equal(memory, content)
    if pages.can_make_huge():
        assert moving.moved_bytes == memory.nbytes


@pytest.mark.skipif(not pages.can_copy_to_huge(), reason="there are no such pages")
def test_what_lies_in_a_file_moves_to_huge_pages_of_its_own_under_those_who_read_it(tmp_path: Path) -> None:
    """Only whole huge pages move; the bytes before the first and after the last one stay in pages of the file."""
    content = torch.randint(0, 256, (5 * HUGE_PAGE + 77,), dtype=torch.uint8)
    with (tmp_path / "file").open("w+b") as file:
        file.write(content.numpy().tobytes())
        file.flush()
        memory = pages.map_file(file.fileno(), len(content))
        in_files = [memory[2 * HUGE_PAGE + 99 : 4 * HUGE_PAGE + 1], memory[4096 : 2 * HUGE_PAGE + 5]]
        moving = HugePages(None, in_files, AT_ONCE)
        while not moving.wait(0.0):
            assert torch.equal(memory, content)
        assert moving.moved_bytes == 3 * HUGE_PAGE
        file.seek(0)
        file.write(bytes(len(content)))
    assert torch.equal(memory[HUGE_PAGE : 4 * HUGE_PAGE], content[HUGE_PAGE : 4 * HUGE_PAGE])
    assert not memory[:HUGE_PAGE].any()
    assert not memory[4 * HUGE_PAGE :].any()


def test_moving_into_huge_pages_ends_when_the_model_goes_to_sleep() -> None:
    later = WeightLimits(move_after_s=60.0)
    moving = HugePages(torch.empty(64 << 20, dtype=torch.uint8), (), later, make_huge=lambda *where: True)
    moving.close()
    assert moving.wait(60)
    assert moving.moved_bytes == 0


def test_a_system_without_huge_pages_keeps_small_ones() -> None:
    asked: list[Any] = []
    memory = torch.empty(256 << 20, dtype=torch.uint8)
    moving = HugePages(memory, (), AT_ONCE, make_huge=lambda *where: bool(asked.append(where)))
    assert moving.wait(60)
    assert len(asked) == 1


def test_chunks_on_a_device_are_checked_at_once_and_one_that_is_bad_is_named() -> None:
    def written(name: str, values: torch.Tensor) -> Any:
        return WrittenChunk(name, values, total_of(values))

    huge = torch.full((4,), 3e38).bfloat16()  # valid, although its sum is infinite
    good = [written("a", torch.ones(5).bfloat16()), written("b", huge), written("c", torch.ones(3, dtype=torch.uint8))]
    check_written(good)
    check_written([])
    with pytest.raises(CheckpointError, match="tensor d holds NaN or infinity"):
        check_written([*good, written("d", torch.tensor([1.0, torch.nan]))])


def test_pieces_for_a_device_are_larger_than_a_cpus_caches(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    stored = index_checkpoint(tmp_path)["t0"]

    def num_pieces(device: str) -> int:
        place = type("Place", (), {"shape": (37, 23), "device": torch.device(device)})
        return len(list(cut(Job("t0", (stored,), place), SMALL)))

    assert num_pieces("cpu") == 2
    assert num_pieces("cuda") == 1

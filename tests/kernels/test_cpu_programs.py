"""Computations recorded as programs of the C library. A replay computes the same bits as a new computation from the present inputs.

An operation that cannot be recorded is refused.
"""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from pilotlight.kernels.attention.attention_rule import AttentionRule
from pilotlight.kernels.attention.decode_attention import decode_attention
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE
from pilotlight.kernels.cpu.recording import NotRecordableError, Program, ProgramRecorder
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.elementwise.norm import add_rms_norm, rms_norm
from pilotlight.kernels.elementwise.qkv import rotate_and_cache
from pilotlight.kernels.elementwise.rows import rows_of
from pilotlight.kernels.matrices.linear import gated_linear, linear, logits
from tests.cpu_kernels import C_LIBRARY, TORCH, computing_with

pytestmark = pytest.mark.cpu_only
DTYPES = [torch.float32, torch.bfloat16]
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 6, 2, 14, 4


@pytest.fixture(autouse=True)
def arithmetic() -> Iterator[str]:
    with computing_with(C_LIBRARY):
        yield C_LIBRARY


@pytest.fixture(autouse=True)
def _as_a_step_is_computed() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(autouse=True, params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# The test starts a process with separate threads, so one number of threads here is enough.
in_another_process = pytest.mark.parametrize("threads", [1], indirect=True)


class Layer:
    """A decoder's layer and head with all operations, and inputs at fixed addresses."""

    def __init__(self, rows: int, dtype: torch.dtype, hidden: int = 84, intermediate: int = 1100) -> None:
        def weight(*shape: int) -> Tensor:
            return (torch.randn(*shape) * shape[-1] ** -0.5).to(dtype)

        self.table, self.head = weight(50, hidden), weight(431, hidden)
        self.norms = [torch.rand(hidden).to(dtype) for _ in range(3)]
        self.qkv, self.o = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, hidden), weight(hidden, HEADS * HEAD_DIM)
        self.gate_up, self.down = weight(2 * intermediate, hidden), weight(hidden, intermediate)
        self.cos, self.sin = torch.rand(2, 40, HEAD_DIM // 2).unbind()
        self.cache = torch.randn(2, rows * 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM).to(dtype)
        self.token_ids = torch.zeros(rows, dtype=torch.int64)
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.positions = torch.zeros(rows, dtype=torch.int64)
        self.slots = torch.zeros(rows, dtype=torch.int64)
        self.tables = torch.arange(rows * 3).view(rows, 3)
        self.draw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        rows = len(self.token_ids)
        self.token_ids.copy_(torch.randint(0, 50, (rows,), generator=generator))
        self.lengths.copy_(torch.randint(1, 3 * BLOCK_SIZE + 1, (rows,), generator=generator))
        self.positions.copy_(self.lengths - 1)
        blocks = self.tables.gather(1, (self.positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        self.slots.copy_(blocks * BLOCK_SIZE + self.positions % BLOCK_SIZE)

    def __call__(self) -> tuple[Tensor, Tensor]:
        rows = len(self.token_ids)
        residual = rows_of(self.table, self.token_ids, 3.0)
        turns = rows_of(self.cos, self.positions), rows_of(self.sin, self.positions)
        qkv = linear(rms_norm(residual, self.norms[0], 1e-5), self.qkv).view(rows, HEADS + 2 * KV_HEADS, HEAD_DIM)
        k_cache, v_cache = self.cache
        q = rotate_and_cache(qkv, None, 0.0, *turns, k_cache, v_cache, self.slots)
        seen = decode_attention(q, k_cache, v_cache, self.tables, self.lengths, 3 * BLOCK_SIZE, AttentionRule(0.3))
        x, residual = add_rms_norm(linear(seen.reshape(rows, -1), self.o), residual, self.norms[1], 1e-5)
        x = linear(gated_linear(x, self.gate_up, None, silu_and_mul), self.down)
        hidden = add_rms_norm(x, residual, self.norms[2], 1e-5)[0]
        return hidden, logits(hidden, self.head)


def record(forward: Callable[[], tuple[Tensor, ...]], recorder: ProgramRecorder | None = None) -> Program:
    return (recorder or ProgramRecorder(torch.float32)).record(forward)


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
        assert mine.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 24, 25, 64])
def test_a_replay_computes_the_same_bits_from_new_inputs(rows: int, dtype: torch.dtype) -> None:
    layer, recorder = Layer(rows, dtype), ProgramRecorder(dtype)
    if not recorder.takes(rows):
        with pytest.raises(NotRecordableError, match=r"aten\.linear"):  # recording fails, as `takes` predicted
            record(layer, recorder)
        return
    program = record(layer, recorder)
    assert_equal(program.output, layer())
    for seed in range(1, 30):
        layer.draw(seed)
        for output in program.output:
            output.fill_(torch.nan)
        program.replay()
        written = layer.cache.clone()
        assert_equal(program.output, layer())
        assert torch.equal(layer.cache, written), "keys and values are the same, too"


def test_programs_of_one_recorder_share_their_memory_and_disturb_no_other() -> None:
    recorder = ProgramRecorder(torch.float32)
    layers = [Layer(rows, torch.float32) for rows in (3, 1, 64, 16)]
    programs = [record(layer, recorder) for layer in layers]
    assert recorder.workspace is not None
    recorder.workspace.empty((HUGE_PAGE,), torch.uint8)
    assert recorder.workspace.sizes == [HUGE_PAGE], "2 MiB suffice for each, and between recordings all of it is free"
    for _ in range(3):
        for layer, program in zip(layers, programs, strict=True):
            program.replay()
            assert_equal(program.output, layer())


def test_what_dies_in_a_recording_makes_room_and_what_lives_keeps_it() -> None:
    weight, half, x = torch.randn(1024, 1024), torch.randn(1024, 512), torch.randn(64, 1024)

    def forward() -> tuple[Tensor, ...]:
        y = linear(x, weight)
        kept = y[:, :512]
        for _ in range(30):  # 256 KiB each: together far more than 2 MiB, unless memory is reused
            y = rms_norm(linear(y, weight), weight[0], 1e-5)
        return y, linear(kept, half)

    recorder = ProgramRecorder(torch.float32)
    program = record(forward, recorder)
    assert recorder.workspace is not None
    assert recorder.workspace.sizes == [HUGE_PAGE]
    program.replay()
    assert_equal(program.output, forward())


@pytest.mark.parametrize(
    ("what", "forward"),
    [
        ("aten.add", lambda x, w: (linear(x + x, w),)),
        ("aten.item", lambda x, w: (linear(x, w), float(x[0, 0]))),
        ("aten.reshape", lambda x, w: (linear(x.t().reshape(12, 48)[:, :24], w),)),
        ("aten.lift_fresh", lambda x, w: (linear(torch.tensor([[1.0] * 24]), w),)),
        ("aten.silu", lambda x, w: (torch.nn.functional.silu(linear(x, w)),)),
        ("aten.linear", lambda x, w: (linear(x.t(), w),)),
        ("aten.copy_", lambda x, w: (x.copy_(linear(x, w)),)),
        ("not made by the C library", lambda x, w: (x,)),
    ],
)
def test_what_the_library_does_not_compute_cannot_be_recorded(
    what: str, forward: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
) -> None:
    x, weight = torch.randn(24, 24), torch.randn(24, 24)
    with pytest.raises(NotRecordableError, match=what):
        record(lambda: forward(x, weight))
    program = record(lambda: (linear(x, weight),))  # the failed recording has left nothing
    assert program.num_steps == 2, "rows are packed, then multiplied"
    program.replay()
    assert_equal(program.output, (linear(x, weight),))


@pytest.mark.long
def test_what_a_program_reads_lives_as_long_as_it_does() -> None:
    layer = Layer(3, torch.float32)
    gone = weakref.ref(layer)
    program = record(layer)
    expected = [output.clone() for output in layer()]
    del layer
    gc.collect()
    program.replay()
    assert_equal(program.output, tuple(expected))
    del program
    gc.collect()
    assert gone() is None


def test_programs_that_run_at_once_in_several_threads_all_get_their_results() -> None:
    """The library has one team of threads: a program that finds it busy is computed by the calling thread."""
    layers = [Layer(rows, torch.float32) for rows in (1, 2, 3, 4)]
    programs = [record(layer) for layer in layers]
    expected = [[output.clone() for output in program.output] for program in programs]

    def replay(index: int) -> bool:
        program = programs[index]
        for _ in range(100):
            with torch.inference_mode():
                for output in program.output:
                    output.fill_(torch.nan)
                program.replay()
                if not all(torch.equal(a, b) for a, b in zip(program.output, expected[index], strict=True)):
                    return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(replay, range(4)))


@pytest.mark.process
@in_another_process
def test_recording_imports_no_compiler() -> None:
    """Importing torch's compiler would take two seconds of the recorded step."""
    script = """
import sys, torch
from pilotlight.kernels.cpu import library
from pilotlight.kernels.cpu.recording import ProgramRecorder
from pilotlight.kernels.matrices.linear import linear
library.start(wait=True)
before = set(sys.modules)
program = ProgramRecorder(torch.float32).record(lambda x=torch.ones(1, 8), w=torch.ones(8, 8): (linear(x.view(1, 8), w),))
program.replay()
assert program.output[0].tolist() == [[8.0] * 8]
assert not set(sys.modules) - before, set(sys.modules) - before
"""
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.process
@in_another_process
def test_a_forked_child_replays_with_threads_of_its_own() -> None:
    script = """
import os, torch
from pilotlight.kernels.cpu import library
from pilotlight.kernels.cpu.recording import ProgramRecorder
from pilotlight.kernels.matrices.linear import linear
torch.set_num_threads(3)
library.start(wait=True)
x, weight = torch.randn(2, 512), torch.randn(600, 512)
program = ProgramRecorder(torch.float32).record(lambda: (linear(x, weight),))
expected = linear(x, weight)
child = os.fork()
program.output[0].fill_(torch.nan)
program.replay()
if child == 0:
    os._exit(0 if torch.equal(program.output[0], expected) else 1)
assert os.waitpid(child, 0)[1] == 0
assert torch.equal(program.output[0], expected)
"""
    done = subprocess.run([sys.executable, "-c", script], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_the_library_there_is_nothing_to_record() -> None:
    recorder = ProgramRecorder(torch.float32)
    assert recorder.takes(1)
    with computing_with(TORCH):
        assert not recorder.takes(1)
        with pytest.raises(NotRecordableError, match="not loaded"):
            recorder.record(lambda: (torch.ones(1),))

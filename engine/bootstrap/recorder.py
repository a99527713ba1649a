"""Recording of a loaded model's bootstrap program, for its next start.

The model runs one forward pass in which nothing is computed. Knows the model's tensors and where their bytes are in the checkpoint; tensors that no
file contains in the same form are written to the program's own file. A model of which torch computes a part, or in which experts are chosen, has no
such program.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch

from pilotlight.engine.api.protocol import HostConfig, ModelInfo, ModelSpec
from pilotlight.engine.bootstrap import bootstrap_store
from pilotlight.engine.bootstrap.bootstrap_runner import follows_batch
from pilotlight.engine.bootstrap.program import (
    Address,
    BootstrapProgram,
    FileRange,
    Inputs,
    ProgramError,
    ProgramWeight,
    Step,
    encode,
    encode_sum,
    place,
    read,
)
from pilotlight.engine.execution.batch import Batch, DecodeBatch, GroupBatch
from pilotlight.engine.execution.context import Context
from pilotlight.engine.kv.pool.layout import CacheLayout
from pilotlight.engine.models.decoder import Decoder
from pilotlight.engine.models.model import Model
from pilotlight.engine.weights.filling import as_bytes
from pilotlight.kernels.cpu import functions
from pilotlight.kernels.cpu import library as cpu
from pilotlight.kernels.cpu.build import BuildError
from pilotlight.kernels.cpu.recording import NotRecordableError, Workspace
from pilotlight.kernels.cpu.transcript import NativeCall, transcribe

log = logging.getLogger(__name__)

ROWS = 16  # tokens at once
MOST_TOKENS = 4096  # of one sequence: the rotary tables cover so many positions
_FIRST_AFTER_S = 0.5  # the request that woke the model comes first
_LIBRARY_WITHIN_S = 60.0
_STEP_BYTES = 4 << 20
_PAUSE_S = 0.01  # after each step
_LOOK_S = 0.05


class TensorLayout(NamedTuple):
    """A loaded model's tensors by name, and the file ranges that contain some of them unchanged."""

    tensors: Mapping[str, torch.Tensor]
    in_files: Mapping[str, tuple[FileRange, ...]]


class RecordedProgram(NamedTuple):
    path: Path
    program: BootstrapProgram
    own: list[torch.Tensor]  # tensors for its own file, in order


def record(
    model: Model,
    laid: TensorLayout,
    layout: CacheLayout,
    fingerprint: str,
    spec: ModelSpec,
    host: HostConfig,
    info: ModelInfo,
) -> RecordedProgram | None:
    """Record the model's program; return None if it cannot have one, or has one already.

    `layout`: of the KV cache's blocks.
    """
    library = bootstrap_store.library()
    if cpu.loaded is None or library is None or not isinstance(model, Decoder) or info.pooling is not None:
        return None
    try:
        path = bootstrap_store.path_of(fingerprint, spec.dtype, library)
        sizes = (host.kv_bytes, host.block_size, spec.kv_tokens)
        if _is_there(path, sizes):
            return None
        if len(layout.groups) > 1:
            raise NotRecordableError("its layers have several block tables")
        written = _Transcription(model, laid, layout, info)
    except (NotRecordableError, BuildError) as error:
        log.info("%s has no bootstrap program: %s", spec.name, error)
        return None
    if sum(tensor.nbytes for tensor in written.own) > bootstrap_store.MOST_OWN_BYTES:
        log.info(
            "%s has no bootstrap program: too many of its weights are in no file in the form it computes with",
            spec.name,
        )
        return None
    program = BootstrapProgram(
        fingerprint=fingerprint,
        library=library.stem,
        host=sizes,
        info=info,
        rows=ROWS,
        max_blocks=written.max_blocks,
        block_bytes=written.cache.nbytes,
        hidden_bytes=written.picked.nbytes // ROWS,
        weights=tuple(written.weights),
        work=tuple(written.workspace.sizes),
        inputs=written.inputs,
        forward=written.forward,
        hidden=written.hidden,
        logits=written.logits,
        logits_at=written.logits_at,
    )
    return RecordedProgram(path, program, written.own)


def _is_there(path: Path, sizes: tuple[int | None, ...]) -> bool:
    try:
        with path.open("rb") as file:
            return read(file.fileno())[0].host == sizes
    except (OSError, ProgramError):
        return False


class _Transcription:
    def __init__(self, model: Decoder, laid: TensorLayout, layout: CacheLayout, info: ModelInfo) -> None:
        assert cpu.loaded is not None
        tokens = min(info.context_length, MOST_TOKENS)
        self.max_blocks = -(-tokens // info.block_size)
        self.workspace = Workspace(cpu.loaded)
        self._place_weights(model, laid, tokens)
        assert model.norm is not None
        assert model.embedding is not None
        hidden_size, dtype = model.norm.weight.shape[0], model.embedding.dtype
        sizes = [4 * ROWS * 8, ROWS * self.max_blocks * 8, ROWS * hidden_size * dtype.itemsize]
        starts = place(sizes)
        self.inputs = Inputs(starts[1], starts[2], starts[2] + sizes[2])
        self._memory = torch.zeros(self.inputs.num_bytes, dtype=torch.uint8)
        self.cache = layout.new_blocks(1, torch.device("cpu"))
        numbers, tables, self.picked = (self._memory[at : at + size] for at, size in zip(starts, sizes, strict=True))
        numbers, tables = numbers.view(torch.int64).view(4, ROWS), tables.view(torch.int64).view(ROWS, -1)
        token_ids, positions, slots, context_lens = numbers.unbind()
        decode = DecodeBatch(tables, context_lens, self.max_blocks * info.block_size)
        batch = Batch(token_ids, positions, (GroupBatch(slots, decode),), ROWS)
        layers = layout.views(self.cache)
        picked = self.picked.view(dtype).view(ROWS, hidden_size)
        calls, hidden = transcribe(self.workspace, lambda: model.forward(Context(batch, layers)))
        more, logits = transcribe(self.workspace, lambda: model.logits(picked))
        if hidden.shape != picked.shape or not (hidden.is_contiguous() and logits.is_contiguous()):
            raise NotRecordableError("its results are not stored row by row")
        self.forward, self.logits = self._steps(calls), self._steps(more)
        self.hidden, self.logits_at = self._find(hidden.data_ptr()), self._find(logits.data_ptr())

    def _place_weights(self, model: Decoder, laid: TensorLayout, tokens: int) -> None:
        """Find the checkpoint's tensors and the rotary tables, limited to the positions in use."""
        computed = [part for table in model.rotary for part in (table.cos, table.sin)]
        self.own = [tensor for name, tensor in laid.tensors.items() if name not in laid.in_files]
        self.own += [table[:tokens] for table in computed]
        in_files = [(laid.tensors[name], parts) for name, parts in laid.in_files.items()]
        starts = place([tensor.nbytes for tensor in self.own])
        self.weights = [ProgramWeight(tensor.nbytes, (), start) for tensor, start in zip(self.own, starts, strict=True)]
        self.weights += [ProgramWeight(tensor.nbytes, parts) for tensor, parts in in_files]
        tensors = [*self.own, *(tensor for tensor, _ in in_files)]
        self._weights_at = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors]

    def _steps(self, calls: Sequence[NativeCall]) -> tuple[Step, ...]:
        """Return the calls by names. Products become those of few rows, whose arguments are the same."""
        steps = tuple(
            Step(
                call.function.replace("gemm", "linear"),
                tuple(
                    self._find(int(argument)) if letter == "p" and argument else argument
                    for argument, letter in zip(call.arguments, functions.arguments_of(call.function), strict=True)
                ),
            )
            for call in calls
        )
        for step in steps:
            if not follows_batch(step, ROWS, self.max_blocks):
                raise NotRecordableError(f"{step.function} cannot be adapted to a batch")
        return steps

    def _find(self, address: int) -> Address:
        for i, (start, end) in enumerate(self._weights_at):
            if start <= address < end:
                return Address("weight", i, address - start)
        for name, memory in (("input", self._memory), ("kv", self.cache)):
            if 0 <= address - memory.data_ptr() < memory.nbytes:
                return Address(name, 0, address - memory.data_ptr())
        found = self.workspace.place(address)
        if found is None:
            raise NotRecordableError("it reads memory that is neither a weight nor a result")
        return Address("work", *found)


class BackgroundRecorder:
    """A thread that records and writes a program when no request waits any more, and then ends."""

    def __init__(self, make: Callable[[], RecordedProgram | None], first_after_s: float = _FIRST_AFTER_S) -> None:
        self._make: Callable[[], RecordedProgram | None] | None = make
        # Not a daemon: it holds tensors, and releasing one while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, args=(first_after_s,), name="opening")
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @torch.inference_mode()
    def _run(self, first_after_s: float) -> None:
        assert self._make is not None
        try:
            _pause(first_after_s)
            self._await_library()
            written, self._make = self._make(), None
            if written is not None:
                bootstrap_store.write(written.path, _content(written))
        except _EndingError:
            pass
        except OSError as error:
            log.info("a bootstrap program was not written: %s", error)

    @staticmethod
    def _await_library() -> None:
        """Wait for the C library, which is compiled after the very first load."""
        until = time.monotonic() + _LIBRARY_WITHIN_S
        while cpu.loaded is None and time.monotonic() < until:
            _pause(_LOOK_S)


def _content(written: RecordedProgram) -> Iterator[bytes | memoryview]:
    yield encode(written.program)
    end = checksum = 0
    for tensor, weight in zip(written.own, written.program.weights, strict=False):
        gap = bytes(weight.start - end)
        yield gap
        checksum = crc32(gap, checksum)
        content = as_bytes(tensor)
        for start in range(0, len(content), _STEP_BYTES):
            step = content[start : start + _STEP_BYTES]
            yield step
            checksum = crc32(step, checksum)
            _pause(_PAUSE_S)
        end = weight.start + weight.num_bytes
    yield encode_sum(checksum)


class _EndingError(Exception):
    """The process is about to end."""


def _pause(seconds: float) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if not threading.main_thread().is_alive():
            raise _EndingError
        time.sleep(min(left, _LOOK_S))

"""Reads a checkpoint into tensors that the model has laid out, with several threads.

Data that is stored in the engine's form is read into its final place. Data that must be converted, transposed or unpacked passes through a thread's
buffer, a chunk at a time, so that a load needs the memory of the weights and a few buffers. This module knows byte ranges and chunks, and is
independent of what a tensor is for.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.staging import Copier, Make, Staging, copy, make_copier
from pilotlight.engine.weights.storage import Job
from pilotlight.engine.weights.stored_tensor import StoredTensor
from pilotlight.engine.weights.tensor_bytes import DTYPES, Write, as_bytes, is_stored_as, read_into
from pilotlight.kernels.cpu.finite import is_finite, total_of

ReadingProgress = Callable[[int, int], None]  # (bytes done, bytes in total)

# Size of a chunk: a core's share of the last-level cache, so that a chunk is still in the cache when its values are checked.
CHUNK_BYTES = 4 << 20
_MAPPED_CHUNKS = 8  # chunks joined into one if they are only checked, and need not be in a cache
# Number of chunks joined into one copy to a device: starting a copy takes some 80 us, in which a bus moves 4 MiB.
_COPIED_CHUNKS = 4
# If mapped memory is checked at less than this rate, its pages are being read from a disk.
_DISK_BYTES_PER_S = 1 << 30
_MOST_THREADS = 8  # more threads make no disk faster, and memory hardly so


class WeightChunk(NamedTuple):
    """A run of rows of a job."""

    job: Job
    start: int  # first row
    end: int

    @property
    def into(self) -> torch.Tensor:
        return self.job.into[self.start : self.end] if self.job.is_row_wise else self.job.into

    def range_of(self, stored: StoredTensor) -> tuple[int, int]:
        if not self.job.is_row_wise:
            return stored.start, stored.end
        row = (stored.end - stored.start) // stored.shape[0]
        return stored.start + self.start * row, stored.start + self.end * row

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in map(self.range_of, self.job.stored))


def fill(
    jobs: Sequence[Job],
    tasks: Sequence[Callable[[], None]] = (),
    on_progress: ReadingProgress | None = None,
    write: Write | None = None,
    copier: Copier | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Do all jobs and tasks, in several threads.

    With `write` the jobs' tensors are on `meta`, and their bytes are passed to `write` with their offset. Raises CheckpointError for NaN, infinity
    and files that are cut off meanwhile, and OSError if a file cannot be read or `write` fails.
    """
    chunks = sorted((chunk for job in jobs for chunk in cut(job, chunk_bytes)), key=_place_in_files)
    _Filler(chunks, tasks, on_progress, write, copier).run()


class _Filler:
    def __init__(
        self,
        chunks: Sequence[WeightChunk],
        tasks: Sequence[Callable[[], None]],
        on_progress: ReadingProgress | None,
        write: Write | None,
        copier: Copier | None,
    ) -> None:
        self._tasks: Iterator[WeightChunk | Callable[[], None]] = iter([*tasks, *chunks])
        self._num_tasks = len(tasks) + len(chunks)
        self._on_progress = on_progress
        self._write = write
        self._copier = copier or make_copier(chunks[0].job.into.device if chunks else torch.device("cpu"))
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._total_bytes = sum(chunk.num_bytes for chunk in chunks)
        self._done_bytes = 0
        self._fds: dict[Path, int] = {}
        self._is_from_disk = False

    def run(self) -> None:
        with ExitStack() as files:
            self._files = files
            others = [
                threading.Thread(target=self._work, name="weights", daemon=True)
                for _ in range(min(_MOST_THREADS, os.cpu_count() or 1, self._num_tasks) - 1)
            ]
            for thread in others:
                thread.start()
            self._work()
            for thread in others:
                thread.join()
        if self._failure is not None:
            raise self._failure

    @torch.inference_mode()
    def _work(self) -> None:
        try:
            with self._copier.in_thread():
                staging = Staging(self._copier)
                written: list[WrittenChunk] = []
                while (task := self._next()) is not None:
                    if isinstance(task, WeightChunk):
                        began = time.perf_counter()
                        values = self._read(task, staging)
                        if values.device.type == "cpu":
                            check_finite(task.job.name, is_finite(values))
                            if task.job.is_mapped:
                                self._is_from_disk = values.nbytes < _DISK_BYTES_PER_S * (time.perf_counter() - began)
                        else:
                            written.append(WrittenChunk(task.job.name, values, total_of(values)))
                        self._count(task)
                    else:
                        task()
                staging.wait()
                check_written(written)
        except BaseException as error:
            with self._lock:
                self._failure = self._failure or error

    def _next(self) -> WeightChunk | Callable[[], None] | None:
        with self._lock:
            return None if self._failure is not None else next(self._tasks, None)

    def _read(self, chunk: WeightChunk, staging: Staging) -> torch.Tensor:
        """Read a chunk and return it in the model's form."""
        into, job = chunk.into, chunk.job
        ranges = [chunk.range_of(stored) for stored in job.stored]
        if job.is_mapped:
            if self._is_from_disk:  # announcing gigabytes that are in memory already takes a tenth of a second
                self._announce(job.stored[0].file, *ranges[0])
            return into
        if (
            job.make is None
            and into.device.type == "cpu"
            and into.is_contiguous()
            and is_stored_as(into, job.stored[0])
        ):
            self._read_into(job.stored[0], ranges[0], into, job.name)
            return into
        staged = []
        sizes = [
            into.nbytes if stored.is_coded else end - start
            for stored, (start, end) in zip(job.stored, ranges, strict=True)
        ]
        buffer = staging.next(sum(sizes) + 64 * len(ranges))
        at = 0
        for stored, span, size in zip(job.stored, ranges, sizes, strict=True):
            part = buffer[at : at + size]
            self._read_into(stored, span, part, job.name)
            rows = (chunk.end - chunk.start,) if job.is_row_wise else stored.shape[:1]
            whole = part.view(DTYPES[stored.dtype]).view((*rows, *stored.shape[1:]))
            staged.append(whole[:, *stored.inner] if stored.inner else whole)
            at = -(-(at + size) // 64) * 64
        if self._write is None:
            staging.send(into, staged, job.make or copy)
            return into
        return self._write_made(into, staged, job.make, self._write)

    def _write_made(
        self, into: torch.Tensor, staged: Sequence[torch.Tensor], make: Make | None, write: Write
    ) -> torch.Tensor:
        if make is None and into.is_contiguous() and staged[0].is_contiguous() and staged[0].dtype == into.dtype:
            made = staged[0]
        else:  # with the strides of `into`, so that the bytes have the same order
            made = torch.empty_strided(into.shape, into.stride(), dtype=into.dtype)
            (make or copy)(made, *staged)
        flat = made.as_strided((made.numel(),), (1,))
        write(int(into.storage_offset()) * into.itemsize, as_bytes(flat))
        return made

    def _read_into(self, stored: StoredTensor, span: tuple[int, int], into: torch.Tensor, name: str) -> None:
        fd = self._open(stored.file)
        if not stored.is_coded:
            read_into(fd, stored.file, span[0], as_bytes(into))
            return
        # Imported here because few models need Zstandard.
        from pilotlight.engine.weights.bundles.coded_chunks import decode_chunk

        chunk = memoryview(bytearray(span[1] - span[0]))
        read_into(fd, stored.file, span[0], chunk)
        try:
            decode_chunk(chunk, into.view(-1).view(torch.bfloat16))
        except CheckpointError as error:
            raise CheckpointError(f"chunk {name} cannot be used: {error}; fetch or pack it again") from None

    def _announce(self, file: Path, start: int, end: int) -> None:
        """Ask the system to read these bytes ahead, sequentially, because they are checked next."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open(file), start, end - start, os.POSIX_FADV_WILLNEED)

    def _open(self, file: Path) -> int:
        with self._lock:
            if file not in self._fds:
                fd = self._fds[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
                self._files.callback(os.close, fd)
            return self._fds[file]

    def _count(self, chunk: WeightChunk) -> None:
        with self._lock:
            self._done_bytes += chunk.num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done_bytes, self._total_bytes)


class WrittenChunk(NamedTuple):
    """A chunk that was copied to a device."""

    name: str
    values: torch.Tensor
    total: torch.Tensor  # the sum: finite if all values are, except for a rare overflow


def check_written(chunks: Sequence[WrittenChunk]) -> None:
    """Raise CheckpointError for NaN or infinity; one check for all, because each waits for the device."""
    if chunks:
        totals = torch.stack([chunk.total for chunk in chunks]).isfinite().tolist()
        for chunk, is_sure in zip(chunks, totals, strict=True):
            check_finite(chunk.name, is_sure or is_finite(chunk.values))


def check_finite(name: str, is_finite: bool) -> None:
    """Raise CheckpointError with the tensor's name unless `is_finite`."""
    if not is_finite:
        raise CheckpointError(f"tensor {name} holds NaN or infinity; fetch the checkpoint again")


def cut(job: Job, chunk_bytes: int = CHUNK_BYTES) -> Iterator[WeightChunk]:
    """Yield the chunks of a job; `chunk_bytes` is the size of one that is checked in a cache."""
    rows = job.into.shape[0]
    if not job.is_row_wise:
        yield WeightChunk(job, 0, rows)
        return
    stored_bytes = sum(stored.end - stored.start for stored in job.stored)
    on_device = job.into.device.type == "cuda"
    piece_bytes = chunk_bytes * (_MAPPED_CHUNKS if job.is_mapped else _COPIED_CHUNKS if on_device else 1)
    step = max(1, piece_bytes * rows // max(1, stored_bytes))
    for start in range(0, rows, step):
        yield WeightChunk(job, start, min(start + step, rows))


def _place_in_files(chunk: WeightChunk) -> tuple[str, int]:
    first = chunk.job.stored[0]
    return first.file.name, chunk.range_of(first)[0]

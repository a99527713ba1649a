"""Moves a serving model's weights to huge pages, from which matrix products read a third faster.

On two cores, products of few rows read 60 GB/s instead of 44. Relocation writes a bundle of a model that serves from maps of its checkpoint, and lays
the model out again in the bundle's memory. The new model has the same numbers in the same order, so it may replace the old one at any time. HugePages
moves private memory or maps of files in place. Both use a share of one core, and no request waits for them. This module knows tensors, pauses and
files, and is independent of models.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import torch

from pilotlight.engine.api.errors import CheckpointError
from pilotlight.engine.weights.bundles.bundle import Bundle, BundleIdentity, WeightBundleError, lay_out
from pilotlight.engine.weights.bundles.bundle_file import BundleFile, is_being_written, new_bundle
from pilotlight.engine.weights.bundles.bundle_maps import MAPS
from pilotlight.engine.weights.bundles.lossless import CodedTensors, Matrix
from pilotlight.engine.weights.tensor_bytes import Write, as_bytes
from pilotlight.engine.weights.weight_limits import WeightLimits
from pilotlight.kernels.cpu import pages
from pilotlight.kernels.cpu.mapped_file import HUGE_PAGE, copy_to_huge

log = logging.getLogger(__name__)

_MOVE_BYTES = 32 << 20
_LOOK_S = 0.05  # interval of checks whether the process is ending

ModelT = TypeVar("ModelT")
T = TypeVar("T")


class Coding(NamedTuple):
    """The coding of matrices in 12 bits during a relocation."""

    identity: BundleIdentity
    matrices: Mapping[str, Matrix]
    is_wanted: Callable[[], bool]  # decides whether to code; it may measure the speed first


@dataclass(frozen=True, slots=True)
class PendingRelocation(Generic[ModelT]):
    """The data needed to move a model's weights to a bundle or to private memory."""

    path: Path | None  # path of the bundle; None for private memory
    bundle: Bundle
    tensors: Mapping[str, torch.Tensor]  # the model's tensors, by their names in the bundle
    check_unchanged: Callable[[], None]  # raises CheckpointError if the checkpoint's files have changed
    rebuild: Callable[[torch.Tensor, Bundle], ModelT]  # lays the model out on memory with the bundle's bytes
    coding: Coding | None = None  # None if matrices stay plain


class Relocation(Generic[ModelT]):
    """A thread that moves a model's weights, and ends once that is done or has failed.

    It finishes a shared bundle even if the model is closed meanwhile, because the model will wake from the bundle.
    """

    def __init__(
        self,
        pending: PendingRelocation[ModelT],
        adopt: Callable[[ModelT], None],
        limits: WeightLimits,
    ) -> None:
        """Start the thread. `adopt` is called with the new model, which replaces the old one."""
        self.is_done = False
        self._pending: PendingRelocation[ModelT] | None = pending
        self._adopt: Callable[[ModelT], None] | None = adopt
        self._limits = limits
        self._is_closed = threading.Event()
        # Not a daemon, because the thread holds tensors, and freeing one while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, name="relocation")
        self._thread.start()

    def close(self) -> None:
        """Stop the move if it is to private memory; a bundle is still written, in the background."""
        self._is_closed.set()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @torch.inference_mode()
    def _run(self) -> None:
        assert self._pending is not None
        path = self._pending.path
        try:
            self._pause(self._limits.move_after_s)
            bundle, tensors = self._lay_out(self._pending)
            copy = partial(self._copy, self._pending, bundle, tensors)
            memory = self._copy_privately(bundle, copy) if path is None else self._share_bundle(bundle, path, copy)
            self._move(self._pending, memory, bundle)
        except _NotNeeded:
            pass
        except (WeightBundleError, CheckpointError, OSError) as error:
            where = path or "private memory"
            log.info("a model's weights are not moved to %s: %s", where, error)
        except Exception:  # the model computes with its weights where they are
            log.exception("a model's weights are not moved")
        self._pending = self._adopt = None

    def _lay_out(self, pending: PendingRelocation[ModelT]) -> tuple[Bundle, CodedTensors]:
        coding = pending.coding
        if coding is not None and not coding.is_wanted():
            coding = None
        tensors = CodedTensors(pending.tensors, {} if coding is None else coding.matrices, self._limits.coded_share)
        for _ in self._slowly(tensors.survey()):
            if pending.path is None:
                self._check_needed()
        if coding is None:
            return pending.bundle, tensors
        return lay_out(coding.identity, pending.bundle.facts, tensors.specs), tensors

    def _move(self, pending: PendingRelocation[ModelT], memory: torch.Tensor, bundle: Bundle) -> None:
        assert self._adopt is not None
        self._check_needed()
        self._adopt(pending.rebuild(memory, bundle))
        self.is_done = True
        self._pause(self._limits.unmap_after_s)

    def _copy_privately(self, bundle: Bundle, copy: Callable[[Write], None]) -> torch.Tensor:
        memory = pages.empty((bundle.size,), torch.uint8)
        into = as_bytes(memory)

        def write(start: int, content: memoryview) -> None:
            self._check_needed()
            into[start : start + len(content)] = content

        copy(write)
        return memory

    def _share_bundle(self, bundle: Bundle, path: Path, copy: Callable[[Write], None]) -> torch.Tensor:
        """Write the bundle at `path`, unless another process does, and return a map of it."""
        while is_being_written(path):
            self._check_needed()
            self._pause(_LOOK_S)
        if (memory := _map(path, bundle)) is not None:
            return memory
        MAPS.drop_removed_maps()
        with new_bundle(path, bundle) as new:

            def write(start: int, content: memoryview) -> None:
                if not new.is_linked:
                    raise WeightBundleError("another bundle has replaced it")
                new.write_huge(start, content)

            copy(write)
            memory = new.map()
        MAPS.cache_map(path, memory)
        return memory

    def _copy(self, pending: PendingRelocation[ModelT], bundle: Bundle, tensors: CodedTensors, write: Write) -> None:
        for _ in self._slowly(tensors.write(bundle, write)):
            pass
        pending.check_unchanged()

    def _slowly(self, steps: Iterator[T]) -> Iterator[T]:
        """Yield from `steps`, with pauses that limit this thread to its share of a core."""
        while True:
            began = time.thread_time()  # CPU time: with wall time, other load would also lengthen this thread's pauses
            step = next(steps, None)
            if step is None:
                return
            self._pause((time.thread_time() - began) * (1 / self._limits.move_share - 1))
            yield step

    def _check_needed(self) -> None:
        if self._is_closed.is_set():
            raise _NotNeeded

    def _pause(self, seconds: float) -> None:
        """Sleep; raise _NotNeeded as soon as the process is ending."""
        until = time.monotonic() + seconds
        while True:
            if not threading.main_thread().is_alive():
                raise _NotNeeded
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_S))


class _NotNeeded(Exception):
    """The model was closed, or the process is ending."""


def _map(path: Path, bundle: Bundle) -> torch.Tensor | None:
    """Map the bundle at `path`; return None if it is missing or another bundle."""
    try:
        with BundleFile.open(path) as file:
            is_same = (file.bundle.identity, file.bundle.tensors) == (bundle.identity, bundle.tensors)
            return MAPS.map_cached(file) if is_same else None
    except FileNotFoundError:
        return None


class HugePages:
    """A thread that moves weights to huge pages in place, and ends when that is done, or on `close`.

    Weights are loaded into small pages first, because a system that must find huge pages takes longer: seconds per GiB in a virtual machine whose
    free memory belongs to its host, instead of 0.4 s. Weights in maps of files are copied piece by piece, so that a model is never in memory twice.
    """

    def __init__(
        self,
        memory: torch.Tensor | None,
        in_files: Sequence[torch.Tensor],
        limits: WeightLimits,
        make_huge: Callable[[torch.Tensor, int, int], bool] = pages.make_huge,
    ) -> None:
        """Start the thread. `memory`: made by pages.small. `in_files`: tensors in read-only maps of files."""
        self.moved_bytes = 0
        self._memory = memory
        self._in_files = in_files
        self._limits = limits
        self._make_huge = make_huge
        self._closing = threading.Event()
        # Not a daemon, because the thread holds a tensor, and freeing one while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, name="huge-pages")
        self._thread.start()

    @classmethod
    def start(
        cls, memory: torch.Tensor | None, in_files: Sequence[torch.Tensor], limits: WeightLimits
    ) -> "HugePages | None":
        """Start a move; return None if there is nothing to move, or the system does not support it."""
        if memory is not None and (memory.nbytes < HUGE_PAGE or not pages.can_make_huge()):
            memory = None
        if not pages.can_copy_to_huge():
            in_files = ()
        return cls(memory, in_files, limits) if memory is not None or in_files else None

    def close(self) -> None:
        """Stop after the current piece, without waiting for it; the thread holds the memory until then."""
        self._closing.set()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = self._limits.move_after_s
        for num_bytes, move in self._moves():
            if self._closing.wait(pause_s) or not threading.main_thread().is_alive():
                return
            began = time.thread_time()  # CPU time: with wall time, other load would also lengthen this thread's pauses
            if not move():
                log.info("the system has no more huge pages: the rest of the weights stays in small pages")
                return
            self.moved_bytes += num_bytes
            pause_s = (time.thread_time() - began) * (1 / self._limits.move_share - 1)

    def _moves(self) -> Iterator[tuple[int, Callable[[], bool]]]:
        """Yield the number of bytes of each piece, and a function that moves it."""
        if self._memory is not None:
            for start in range(0, self._memory.nbytes, _MOVE_BYTES):
                num_bytes = min(_MOVE_BYTES, self._memory.nbytes - start)
                yield num_bytes, partial(self._make_huge, self._memory, start, num_bytes)
        for begin, end in pages.whole_huge_pages(self._in_files):
            for address in range(begin, end, _MOVE_BYTES):
                num_bytes = min(_MOVE_BYTES, end - address)
                yield num_bytes, partial(copy_to_huge, address, num_bytes)

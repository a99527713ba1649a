"""Gives a model that already serves from its checkpoint's own pages a bundle in huge pages, and then makes it anew there.

Nobody waits for it: it takes a share of a core, and the model that it makes has the same numbers in the same order, so that one may take the other's
place at any time. What it has begun to write for the host tier it finishes even when the model has been let go meanwhile, since that is what the
model will wake from. Knows tensors, pauses and files; refuses to know models.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch

from engine.errors import CheckpointError
from engine.weights.bundle import Bundle, BundleError
from engine.weights.bundle_file import BundleFile, is_being_written, new_bundle
from engine.weights.filling import Write, as_bytes
from engine.weights.kept_maps import drop_removed, keep, map_kept
from kernels.cpu import pages

log = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20  # under way at once
_SHARE = 0.25  # of a core's time, at most
_FIRST_AFTER_S = 0.5  # the request that woke the model comes first
_LOOK_S = 0.05  # between two looks at whether the process ends
_LAST_STEP_S = 2.0  # then nobody computes on the old pages any more, and it is this thread that unmaps them

ModelT = TypeVar("ModelT")


@dataclass(frozen=True, slots=True)
class Unsettled(Generic[ModelT]):
    """A model on its checkpoint's own pages, and what it takes to make it anew elsewhere."""

    path: Path | None  # of the bundle; None: in memory of the process's own
    bundle: Bundle
    tensors: Mapping[str, torch.Tensor]  # by name, as the bundle has them
    expect_unchanged: Callable[[], None]  # raises CheckpointError when the checkpoint's files are not what they were
    renew: Callable[[torch.Tensor], ModelT]  # on memory that holds the bundle's bytes


class Settling(Generic[ModelT]):
    """A thread that ends by itself when the model has moved, or cannot."""

    def __init__(
        self,
        unsettled: Unsettled[ModelT],
        adopt: Callable[[ModelT], None],
        first_after_s: float = _FIRST_AFTER_S,
        share: float = _SHARE,
    ) -> None:
        """`adopt` is told the new model, which is to take the old one's place."""
        self.is_settled = False
        self._unsettled: Unsettled[ModelT] | None = unsettled
        self._adopt: Callable[[ModelT], None] | None = adopt
        self._share = share
        self._is_let_go = threading.Event()
        # No daemon: it holds tensors, and one that is let go while the interpreter ends aborts the process.
        self._thread = threading.Thread(target=self._run, args=(first_after_s,), name="settling")
        self._thread.start()

    def close(self) -> None:
        """The model is no longer used. A bundle that has been begun will be finished; nobody waits for it."""
        self._is_let_go.set()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @torch.inference_mode()
    def _run(self, first_after_s: float) -> None:
        assert self._unsettled is not None
        path = self._unsettled.path
        try:
            self._pause(first_after_s)
            memory = self._copied(self._unsettled) if path is None else self._shared(self._unsettled, path)
            self._move(self._unsettled, memory)
        except _NobodyNeedsIt:
            pass
        except (BundleError, CheckpointError, OSError) as error:
            where = path or "memory of its own"
            log.info("a model stays on its checkpoint's own pages and does not move to %s: %s", where, error)
        self._unsettled = self._adopt = None

    def _move(self, unsettled: Unsettled[ModelT], memory: torch.Tensor) -> None:
        assert self._adopt is not None
        self._expect_need()
        self._adopt(unsettled.renew(memory))
        self.is_settled = True
        self._pause(_LAST_STEP_S)

    def _copied(self, unsettled: Unsettled[ModelT]) -> torch.Tensor:
        memory = pages.empty((unsettled.bundle.size,), torch.uint8)
        into = as_bytes(memory)

        def write(start: int, content: memoryview) -> None:
            self._expect_need()
            into[start : start + len(content)] = content

        self._copy(unsettled, write)
        return memory

    def _shared(self, unsettled: Unsettled[ModelT], path: Path) -> torch.Tensor:
        """The bundle at `path`, written now, or by somebody else who was about to."""
        while is_being_written(path):
            self._expect_need()
            self._pause(_LOOK_S)
        if (memory := _map(path, unsettled.bundle)) is not None:
            return memory
        drop_removed()
        with new_bundle(path, unsettled.bundle) as new:

            def write(start: int, content: memoryview) -> None:
                if not new.is_wanted:
                    raise BundleError("its place was given to another")
                new.write_huge(start, content)

            self._copy(unsettled, write)
            memory = new.map()
        keep(path, memory)
        return memory

    def _copy(self, unsettled: Unsettled[ModelT], write: Write) -> None:
        for place in unsettled.bundle.places:
            source = as_bytes(unsettled.tensors[place.wanted.name])
            for start in range(0, len(source), _STEP_BYTES):
                began = time.thread_time()  # by the clock, a machine that is busy would make it slower twice
                write(place.start + start, source[start : start + _STEP_BYTES])
                self._pause((time.thread_time() - began) * (1 / self._share - 1))
        unsettled.expect_unchanged()

    def _expect_need(self) -> None:
        if self._is_let_go.is_set():
            raise _NobodyNeedsIt

    def _pause(self, seconds: float) -> None:
        """Also notices that the process is about to end."""
        until = time.monotonic() + seconds
        while True:
            if not threading.main_thread().is_alive():
                raise _NobodyNeedsIt
            left = until - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _LOOK_S))


class _NobodyNeedsIt(Exception):
    """The model, or the whole process, has been let go."""


def _map(path: Path, bundle: Bundle) -> torch.Tensor | None:
    """None: there is none, or it is not this one."""
    try:
        with BundleFile.open(path) as file:
            is_same = (file.bundle.identity, file.bundle.places) == (bundle.identity, bundle.places)
            return map_kept(file) if is_same else None
    except FileNotFoundError:
        return None

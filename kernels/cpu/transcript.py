"""A computation written down as the calls of the C library that it is made of, without computing anything: with their arguments, so that a process
that has no torch can make the same calls.

As recording.py, which records what computes. Knows which calls a thread asked for; refuses to know what is computed, and whose memory the addresses
are of.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from pilotlight.kernels.cpu import library as cpu
from pilotlight.kernels.cpu.c_library import Library
from pilotlight.kernels.cpu.functions import Function
from pilotlight.kernels.cpu.recording import NotRecordableError, Watch, Workspace

T = TypeVar("T")


class NativeCall(NamedTuple):
    function: str  # by its name in the library
    arguments: tuple[int | float | None, ...]  # addresses are those of this process


def transcribe(workspace: Workspace, forward: Callable[[], T]) -> tuple[list[NativeCall], T]:
    """Return the calls that `forward` makes, and its result: tensors without values, in the workspace's memory. Other threads compute as always.
    Raises NotRecordableError where `forward` asks torch to compute."""
    calls: list[NativeCall] = []
    with _writing, _noted(workspace.library, calls), Watch(workspace), torch.inference_mode():
        result = forward()
    return calls, result


_writing = threading.Lock()


@contextmanager
def _noted(library: Library, calls: list[NativeCall]) -> Iterator[None]:
    if cpu.loaded is not library:
        raise NotRecordableError("the C library is not there")
    noting = copy.copy(library)
    for name, functions in vars(library).items():
        if isinstance(functions, dict) and all(map(callable, functions.values())):  # and not how many rows go to which
            setattr(noting, name, {dtype: _Note(function, calls) for dtype, function in functions.items()})
    cpu.loaded = noting
    try:
        yield
    finally:
        cpu.loaded = library


class _Note:
    """A function whose calls by the thread that made this are noted and do nothing."""

    def __init__(self, function: Function, calls: list[NativeCall]) -> None:
        self._function = function
        self._calls = calls
        self._thread = threading.get_ident()

    def __call__(self, *arguments: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._function(*arguments)
        self._calls.append(NativeCall(self._function.__name__, arguments))
        return None

"""A computation as a list of calls of the C library, made without computing anything.

With the list, a process without torch can make the same calls; recording.py records what it computes. Knows which calls a thread made; does not know
what they compute or whose memory the addresses are.
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
    """Return the calls that `forward` makes, and its result: valueless tensors in the workspace's memory.

    Other threads compute as usual. Raises NotRecordableError if `forward` needs torch to compute.
    """
    calls: list[NativeCall] = []
    with _writing, _noted(workspace.library, calls), Watch(workspace), torch.inference_mode():
        result = forward()
    return calls, result


_writing = threading.Lock()


@contextmanager
def _noted(library: Library, calls: list[NativeCall]) -> Iterator[None]:
    if cpu.loaded is not library:
        raise NotRecordableError("the C library is not loaded")
    noting = copy.copy(library)
    for name, functions in vars(library).items():
        if isinstance(functions, dict) and all(map(callable, functions.values())):  # and not the limits of rows
            setattr(noting, name, {dtype: _Note(function, calls) for dtype, function in functions.items()})
    cpu.loaded = noting
    try:
        yield
    finally:
        cpu.loaded = library


class _Note:
    """A function whose calls from the thread that made it are recorded and not executed."""

    def __init__(self, function: Function, calls: list[NativeCall]) -> None:
        self._function = function
        self._calls = calls
        self._thread = threading.get_ident()

    def __call__(self, *arguments: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._function(*arguments)
        self._calls.append(NativeCall(self._function.__name__, arguments))
        return None

"""Errors for bad arguments that name the operation and the argument.

An operation's check names what each argument must be. Whether a call passes depends on its sizes, types and devices only, so calls that are alike in
these are checked once: comparing them with earlier calls takes a tenth of the time. Block ids and slots are on the device: they are checked only when
PILOTLIGHT_DEBUG=1, because that waits for the device. This module knows tensors in general, and is independent of any operation.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

DEBUG = os.environ.get("PILOTLIGHT_DEBUG") == "1"

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # types used to compute
INDICES = (torch.int64, torch.int32)
_MOST_PASSED = 4096  # calls that are remembered; a step of a new size adds about ten
_NUMBERS = frozenset((int, float, bool, str, type(None)))


class ArgumentError(ValueError):
    """An argument that an operation cannot take."""

    def __init__(self, operation: str, argument: str, why: str) -> None:
        super().__init__(f"{operation}: {argument} {why}")
        self.operation, self.argument, self.why = operation, argument, why


class ArgumentCheck:
    """A check of one call's arguments, one by one. It raises ArgumentError for the first wrong argument.

    A size with a name is equal in all arguments of a call.
    """

    def __init__(self, operation: str) -> None:
        self.operation = operation
        self._sizes: dict[str, tuple[int, str]] = {}  # for each name, the size and the argument that set it
        self._first: tuple[str, Tensor] | None = None

    def tensor(
        self, name: str, x: Tensor, shape: str, dtypes: tuple[torch.dtype, ...] = FLOATS, *, dense: int = 0
    ) -> None:
        """Check an argument's type, shape, dtype, device and layout.

        `shape`: a name, number or `_` for each dimension, such as "tokens heads 64". `dense`: how many of the last dimensions must be contiguous.
        Double precision on a CPU is always accepted, as a reference.
        """
        self.require(name, isinstance(x, Tensor), f"is a {type(x).__name__}, wanted a tensor")
        if not (FLOATS[0] in dtypes and x.dtype == torch.float64 and not x.is_cuda):
            wanted = " or ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))
            self.require(name, x.dtype in dtypes, f"has dtype {str(x.dtype).removeprefix('torch.')}, wanted {wanted}")
        self._device(name, x)
        self._shape(name, x, shape)
        self.require(
            name,
            not _misalignment(x),
            f"starts at an address that is not a multiple of its {x.element_size()} bytes; copy it with .clone()",
        )
        side_by_side = 1
        for i in range(x.dim() - 1, x.dim() - 1 - dense, -1):
            if x.shape[i] > 1 and x.numel():
                why = f"has stride {x.stride(i)} in dimension {i}, wanted {side_by_side}; pass it through .contiguous()"
                self.require(name, x.stride(i) == side_by_side, why)
            side_by_side *= x.shape[i]

    def _device(self, name: str, x: Tensor) -> None:
        if self._first is None:
            self._first = name, x
        first, other = self._first
        self.require(name, x.device == other.device, f"lies on {x.device}, and {first} on {other.device}")

    def _shape(self, name: str, x: Tensor, shape: str) -> None:
        wanted = shape.split()
        shown = f"has shape {list(x.shape)}, wanted [{', '.join(wanted)}]"
        self.require(name, x.dim() == len(wanted), shown)
        for size, word in zip(x.shape, wanted, strict=True):
            if word.isdigit():
                self.require(name, size == int(word), shown)
            elif word != "_":
                known, source = self._sizes.setdefault(word, (size, name))
                self.require(name, size == known, f"{shown} with {word} = {known} as {source} has it")

    def size(self, word: str) -> int:
        return self._sizes[word][0]

    def derive(self, word: str, size: int, source: str) -> None:
        """Record a size that is computed from other sizes, under a name that later checks can use."""
        self._sizes[word] = size, source

    def agree(self, name: str, word: str, size: int) -> None:
        """Check that an argument's size equals that of an earlier argument; record it if there is none."""
        known, source = self._sizes.setdefault(word, (size, name))
        self.require(name, size == known, f"is {size}, and {word} = {known} as {source} has it")

    def require(self, name: str, holds: bool, why: str) -> None:
        if not holds:
            raise ArgumentError(self.operation, name, why)

    def indices(self, name: str, x: Tensor, end: int, what: str, begin: int = 0) -> None:
        """Require every index to be in [begin, end), in debug mode only.

        Waits for the device, which is impossible while a graph is captured.
        """
        if DEBUG and x.numel() and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
            low, high = (int(number) for number in torch.aminmax(x))
            bad = low if low < begin else high
            self.require(name, begin <= low and high < end, f"holds {bad}, wanted {begin} to {end - 1}: {what}")


class PassedCalls:
    """The calls that have passed their checks, by operation and by what the checks depend on."""

    def __init__(self) -> None:
        self._passed: set[tuple[Any, ...]] = set()

    def check(self, operation: str, check: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Check a call unless one like it has passed. Raises ArgumentError."""
        call = (operation, *_layout(arguments))
        if DEBUG or call not in self._passed:
            check(ArgumentCheck(operation), *arguments)
            if len(self._passed) >= _MOST_PASSED:
                self._passed.clear()
            self._passed.add(call)


def _layout(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return what checks depend on: the sizes and types of tensors, and other values as they are.

    Tensors in tuples and in dataclasses count, too, and are not kept alive.
    """
    found: list[Any] = []
    for value in values:
        kind: Any = type(value)
        if kind in _NUMBERS:
            found.append(value)
        elif isinstance(value, Tensor):
            found += value.shape, value.stride(), value.dtype
            found.append(True if value.is_cpu else (value.device, _misalignment(value)))
        elif isinstance(value, tuple):
            found.append(_layout(value) if hasattr(kind, "_fields") else value)
        elif (parts := _parts_of(kind)) is not None:
            found.append(_layout(parts(value)))
        else:
            found.append(len(value) if kind is bytes else value)
    return tuple(found)


@cache
def _parts_of(kind: type) -> Callable[[Any], tuple[Any, ...]] | None:
    """Return a function that returns the fields and the type of a dataclass, or None for another type."""
    return attrgetter(*(field.name for field in fields(kind)), "__class__") if is_dataclass(kind) else None


def _misalignment(x: Tensor) -> int:
    """Return the bytes between a GPU tensor's start and the last address that kernels can read.

    On a CPU torch reads from any address."""
    return x.data_ptr() & (x.itemsize - 1) if x.is_cuda and x.numel() else 0

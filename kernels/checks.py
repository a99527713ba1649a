"""Errors for bad arguments that name the operation and the argument.

An operation checks its arguments by one combined condition. Only if that fails does `ArgumentCheck`, which is slower, look for the wrong argument and
report what to change. If it finds none, the call continues. Block ids and slots are on the device: they are checked only when PILOTLIGHT_DEBUG=1,
because that waits for the device. This module knows tensors in general, and is independent of any operation.
"""

import os

import torch
from torch import Tensor

DEBUG = os.environ.get("PILOTLIGHT_DEBUG") == "1"

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # types used to compute
INDICES = (torch.int64, torch.int32)


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
        self._operation = operation
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
        address = x.data_ptr() if x.device.type in ("cpu", "cuda") else 0
        aligned = not x.numel() or address % x.element_size() == 0
        self.require(
            name,
            aligned,
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
            raise ArgumentError(self._operation, name, why)


def placed(x: Tensor, *others: Tensor | None) -> bool:
    """True if all tensors are on one device and, on a GPU, aligned to their element size.

    On a CPU torch reads from any address.
    """
    if x.is_cpu:  # is_cpu takes 0.04 us per tensor, comparing two devices 0.2, and starting a generator 0.3
        for other in others:  # noqa: SIM110
            if other is not None and not other.is_cpu:
                return False
        return True
    parts = [part for part in (x, *others) if part is not None]
    return all(part.device == x.device for part in parts) and not (
        x.is_cuda and any(part.data_ptr() & (part.itemsize - 1) for part in parts)
    )


def check_indices(operation: str, argument: str, indices: Tensor, end: int, what: str, begin: int = 0) -> None:
    """Raise ArgumentError unless every index is in [begin, end).

    Waits for the device, which is impossible while a graph is captured: only for debug mode.
    """
    if indices.numel() and not (indices.is_cuda and torch.cuda.is_current_stream_capturing()):
        low, high = (int(x) for x in torch.aminmax(indices))
        if low < begin or high >= end:
            bad = low if low < begin else high
            raise ArgumentError(operation, argument, f"holds {bad}, wanted {begin} to {end - 1}: {what}")

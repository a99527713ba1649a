"""Triton's `jit` with traceable launches: in a `tracing` thread, a launch is recorded and not run.

So the launches of a model are known before its weights are loaded, and they are compiled while the weights load (kernels/warm_up.py). Every function
of kernels/triton uses this `jit`. This module is independent of the functions' content.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
import triton
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction


@dataclass(frozen=True)
class Pointer:
    """The properties of a tensor on which compiled code depends: its type, and 16-byte alignment."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else self.dtype.itemsize


class Launch(NamedTuple):
    function: "TraceableFunction"
    arguments: tuple[Any, ...]  # tensors are replaced by Pointers
    options: dict[str, Any]  # constants and options of the compiler

    @property
    def variant(self) -> tuple[Any, ...]:
        """Return a key that is equal for launches that need the same machine code."""
        values = dict(zip(self.function.arg_names, self.arguments, strict=False)) | self.options
        kinds = [(name, self.function.kind_of(name, value)) for name, value in sorted(values.items())]
        return self.function.__module__, self.function.__name__, *kinds


class TraceableFunction(JITFunction):  # type: ignore[misc]
    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if _thread.launches is None:
            return super().run(*args, grid=grid, warmup=warmup, **options)
        _thread.launches.append(
            Launch(self, tuple(map(_noted, args)), {name: _noted(x) for name, x in options.items()})
        )
        return None

    def kind_of(self, name: str, value: Any) -> Any:
        """Return the property of an argument on which the compiled code depends."""
        parameter = next((parameter for parameter in self.params if parameter.name == name), None)
        if parameter is None or parameter.is_constexpr or isinstance(value, bool):
            return value
        if isinstance(value, Pointer) and parameter.do_not_specialize_on_alignment:
            return value.dtype
        if not isinstance(value, int):
            return float if isinstance(value, float) else value
        is_wide = not -(2**31) <= value < 2**31
        return is_wide if parameter.do_not_specialize else (is_wide, value == 1, value % 16 == 0)


class TraceableGluonFunction(TraceableFunction, GluonJITFunction):  # type: ignore[misc]
    """A traceable function in Gluon (kernels/triton/gluon.py)."""


def jit(function: Any = None, *, of_batch: Sequence[str] = (), is_gluon: bool = False) -> Any:
    """Return Triton's function for `function`, with traceable launches.

    `of_batch`: arguments that depend on a batch and not on the model. Triton would compile again for such an integer that is 1 or a multiple of 16,
    and for a tensor that is not aligned to 16 bytes, such as a row of a batch's numbers. Do not list strides or the first column of a split:
    unless the compiler knows that they are multiples of 16, it reads fewer than 16 bytes at a time.
    """
    if function is None:
        return lambda given: jit(given, of_batch=of_batch, is_gluon=is_gluon)
    names = list(of_batch)
    assert set(names) <= signature(function).parameters.keys(), f"{function.__name__} takes other arguments"
    if triton.knobs.runtime.interpret:
        return triton.jit(function, do_not_specialize=names)
    kind = TraceableGluonFunction if is_gluon else TraceableFunction
    return kind(function, do_not_specialize=names, do_not_specialize_on_alignment=names)


@contextmanager
def tracing() -> Iterator[list[Launch]]:
    """Collect this thread's launches without running them."""
    before, _thread.launches = _thread.launches, []
    try:
        yield _thread.launches
    finally:
        _thread.launches = before


class _Thread(threading.local):
    launches: list[Launch] | None = None


_thread = _Thread()


def _noted(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return Pointer(argument.dtype, argument.storage_offset() * argument.element_size() % 16 == 0)
    return argument

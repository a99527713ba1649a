"""The declaration of an operation: its formula, calls, cost and tolerance, stated once.

Tests, the sweeps under Triton's interpreter, `make gpu-check` and `make gpu-bench` all read it. This module neither computes nor times anything.
The engine imports nothing from here: a declaration names the functions that the engine calls.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pilotlight.kernels.matrices.weight import Weight

Arguments = dict[str, Any]  # keys: parameter names, which are the same in all forms of an operation
UNIT_ROUNDOFF = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float8_e4m3fn: 2.0**-4,
}


class Cost(NamedTuple):
    """The minimum that a call must do in any form."""

    bytes: int  # read and written, each once
    flops: int = 0  # a multiply-add is two


class Target(NamedTuple):
    """The target of a benchmark call, as a share of a ceiling or of a rival's speed, or in microseconds.

    It is reached if the call takes at most `us`, or at most 1/share of the rival's time or of the time that its cost takes at the ceiling.
    """

    share: float = 0.0
    of: Literal["read", "copy", "matmul", "rival"] = "copy"
    us: float = 0.0


@dataclass(frozen=True)
class Case:
    """One call of an operation.

    `make` draws its arguments on torch's default device, from torch's global generator, in the storage type that it receives.
    """

    name: str
    make: Callable[[torch.dtype], Arguments]
    target: Target | None = None  # set only for a case of the benchmark


@dataclass(frozen=True)
class Operation:
    name: str
    function: Any  # the function that the engine calls, which picks the form by device
    reference: Callable[..., Any]  # the formula in plain torch; receives every floating-point tensor in fp64
    # root-mean-square error that the arithmetic explains, in unit roundoffs of the storage type; state the reason beside it
    roundings: float
    cases: tuple[Case, ...]  # calls for tests, ordinary and awkward, small enough for Triton's interpreter
    bench: tuple[Case, ...]  # calls for the benchmark, as large as those of models
    cost: Callable[[Arguments], Cost]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    arithmetic: float = (
        0.0  # a further error in roundoffs of fp32, in which every form computes; state the reason beside it
    )
    changes: tuple[str, ...] = ()  # arguments that the call writes, compared like results
    scratch: tuple[str, ...] = ()  # arguments that it may overwrite with anything
    # arguments with the same rows (first dimension) as all results: a large call is checked in parts, some rows at a time
    rows: tuple[str, ...] = ()
    triton: str = ""  # module and function below pilotlight.kernels.triton, such as "linear.gemv"; if empty, `function` declares it
    # Torch's own functions, by name, with the same arguments.
    rivals: Mapping[str, Callable[..., Any]] = field(default_factory=dict)

    def triton_form(self) -> Callable[..., Any]:
        module, _, name = (self.triton or self.function.triton).rpartition(".")
        form: Callable[..., Any] = getattr(import_module(f"pilotlight.kernels.triton.{module}"), name)
        return form

    def tolerance(self, dtype: torch.dtype, result: torch.dtype) -> float:
        """Return the largest allowed relative RMS error of a result of type `result`, for a call in `dtype`.

        A result type narrower than `dtype` adds one rounding.
        """
        unit = UNIT_ROUNDOFF[dtype]
        once_more = UNIT_ROUNDOFF.get(result, 0.0)
        own = self.roundings * unit + self.arithmetic * UNIT_ROUNDOFF[torch.float32]
        return own + (once_more if once_more > unit else 0.0)

    def results(self, form: Callable[..., Any], arguments: Arguments) -> dict[str, Tensor]:
        """Call `form`; return its results and the arguments that it changes, by name."""
        returned = form(**arguments)
        parts = returned if isinstance(returned, tuple) else (returned,)
        named = {f"result {i}": part for i, part in enumerate(parts) if isinstance(part, Tensor)}
        return named | {name: arguments[name] for name in self.changes}


def in_double(arguments: Arguments) -> Arguments:
    """Return the call with fp64 tensors for the reference, sharing no memory with the original."""
    return {
        name: _map(value, lambda x: x.double() if x.is_floating_point() else x.clone())
        for name, value in arguments.items()
    }


def copied(arguments: Arguments) -> Arguments:
    """Return a copy of the call with equal strides."""
    return {name: _map(value, _copy) for name, value in arguments.items()}


def tensors(arguments: Arguments) -> list[Tensor]:
    found: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        found.append(x)
        return x

    for value in arguments.values():
        _map(value, note)
    return found


def size(*parts: Tensor | None) -> int:
    """Return the bytes of the elements of some tensors."""
    return sum(part.numel() * part.element_size() for part in parts if part is not None)


def _copy(x: Tensor) -> Tensor:
    """Copy the whole storage, so that the bytes between strided rows are copied, too."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return whole.clone().as_strided(x.shape, x.stride(), x.storage_offset())


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Weight):
        return type(value)(*(_map(getattr(value, part.name), change) for part in fields(value)))  # type: ignore[arg-type]
    if isinstance(value, tuple):
        parts = [_map(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value

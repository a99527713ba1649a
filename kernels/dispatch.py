"""The choice of the form that computes an operation: Triton's, the C library's or torch's.

A CUDA device uses Triton, a CPU the C library; torch computes if the form is missing or does not take the arguments. Whether Triton is used is
decided once per operation, where `operation` declares it; the C library is used as soon as it is loaded. `PILOTLIGHT_TRITON=0` leaves CUDA devices to
torch; `1` loads Triton's forms on a machine without CUDA, too, for the traces of kernels/warm_up.py.
"""

import os
from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, ParamSpec, TypeVar

import torch

from pilotlight.kernels import checks
from pilotlight.kernels.cpu import library as cpu

SWITCH = "PILOTLIGHT_TRITON"
_passed = checks.PassedCalls()
P = ParamSpec("P")
T = TypeVar("T")


def operation(
    check: Callable[..., None],
    *,
    triton: str | None = None,
    native: Callable[..., Any] | None = None,
    guards_itself: bool = False,
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare the decorated function, which computes with torch, as an operation.

    `check` gets an ArgumentCheck and the arguments, and refuses those that no form takes. `native` is the C library's form, called with the loaded
    library and the arguments if the first of them is on a CPU; it returns None for arguments that it cannot take. With `guards_itself` it makes sure
    of all that C assumes, and is called without the check. `triton` names the module of kernels/triton that has a function of the same name and
    signature. All arguments are passed by position.
    """

    def declare(by_torch: Callable[P, T]) -> Callable[P, T]:
        name, parameters = by_torch.__name__, signature(by_torch)
        torch_form: Callable[..., T] = by_torch
        module = triton_form(triton) if triton is not None else None

        @wraps(by_torch)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                bound = parameters.bind(*args, **kwargs)
                bound.apply_defaults()
                args = bound.args
            x = args[0]
            library = cpu.loaded if native is not None and x.is_cpu else None
            is_checked = library is None or not guards_itself or checks.DEBUG
            if is_checked:
                _passed.check(name, check, args)
            if native is not None and library is not None:
                result = native(library, *args)
                if result is not None:
                    return result
                if not is_checked:
                    _passed.check(name, check, args)
            if module is not None and x.is_cuda:
                # The form is looked up by name at each call: its module may import types from the declaring one, which is incomplete while it is
                # imported.
                return getattr(module, name)(*args)
            return torch_form(*args)

        declared: Any = call
        declared.triton = f"{triton}.{name}"  # read by the catalogue of operations
        return call

    return declare


@cache
def takes_triton() -> bool:
    """True if CUDA devices use Triton's forms."""
    wanted = os.environ.get(SWITCH)
    return wanted != "0" and (wanted == "1" or torch.cuda.is_available()) and find_spec("triton") is not None


def triton_form(name: str) -> Any:
    """Return a module of kernels/triton, or None if torch computes."""
    return import_module(f"pilotlight.kernels.triton.{name}") if takes_triton() else None

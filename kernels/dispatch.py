"""Which form of an operation computes a call: Triton's on a CUDA device, the C library's on a CPU, torch's wherever neither is there or takes it.

Chosen once for each operation, where `operation` declares it. `PILOTLIGHT_TRITON=0` leaves CUDA devices to torch; `1` has Triton's forms ready on a
machine without CUDA too, for the traces of kernels/warm_up.py.
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
P = ParamSpec("P")
T = TypeVar("T")


def operation(
    check: Callable[..., None], *, triton: str | None = None, native: Callable[..., Any] | None = None
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Declare the decorated function, which computes by torch, as an operation.

    `native` is the C library's form, called with the loaded library and the arguments where the first of them lies on a CPU; it returns None for what
    it cannot take. `check` raises ArgumentError for what no form takes, given the operation's name and the arguments; C checks what it takes itself.
    `triton` names the module of kernels/triton that has a function of the same name and signature. All get their arguments by position.
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
            if native is not None and x.is_cpu and (library := cpu.loaded) is not None:
                if checks.DEBUG:
                    check(name, *args)
                result = native(library, *args)
                if result is not None:
                    return result
            check(name, *args)
            if module is not None and x.is_cuda:
                # by name at each call: the module may import types of the declaring one, and be unfinished at its import
                return getattr(module, name)(*args)
            return torch_form(*args)

        declared: Any = call
        declared.triton = f"{triton}.{name}"  # for the catalogue
        return call

    return declare


@cache
def takes_triton() -> bool:
    """True if a CUDA device gets Triton's forms."""
    wanted = os.environ.get(SWITCH)
    return wanted != "0" and (wanted == "1" or torch.cuda.is_available()) and find_spec("triton") is not None


def triton_form(name: str) -> Any:
    """Return a module of kernels/triton; None: torch computes."""
    return import_module(f"pilotlight.kernels.triton.{name}") if takes_triton() else None

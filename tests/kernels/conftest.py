"""Every operation is tested twice on a CPU, by the C library and by torch; `make gpu-check` runs these tests on a GPU.

A test's tensors are on the default device.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pilotlight.kernels import checks
from tests.cpu_kernels import BOTH, computing_with

DEVICE = os.environ.get("PILOTLIGHT_TEST_DEVICE", "cpu")


def _hurry_the_interpreter() -> None:
    """Remove unnecessary work of Triton's interpreter, two thirds of its time.

    At every launch and every call of a device function, `tl.max` included, it searches Triton's whole language to replace its functions; nothing is
    compiled in this process, so once is enough. It computes each sum and product again in 64 bits, for an assertion that it makes only in debug mode.
    And it builds a table of all types for every look-up.
    """
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    # ids of the namespaces (`__globals__`) for which Triton's language is patched; all functions of a module share one
    patched: set[int] = set()

    def patch_once(function: Any) -> Any:
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    look_up = interpreter._get_np_dtype
    type_of_scalar = functools.cache(look_up)  # types of pointers and blocks cannot be hashed
    interpreter._get_np_dtype = lambda kind: (
        type_of_scalar(kind) if type(kind) is interpreter.tl.dtype else look_up(kind)
    )


def _widen_bf16_of_products() -> None:
    """Convert the operands of products from bf16: Triton's interpreter stores them as integers, and would multiply these."""
    from triton.runtime import interpreter

    builder = type(interpreter.interpreter_builder)
    multiply = builder.create_dot

    def widened(operand: Any) -> Any:
        if operand.dtype.scalar != interpreter.tl.bfloat16:
            return operand
        bits = torch.from_numpy(operand.data.astype("int32")) << 16
        return interpreter.TensorHandle(bits.view(torch.float32).numpy(), interpreter.tl.float32)

    builder.create_dot = lambda self, a, b, *more: multiply(self, widened(a), widened(b), *more)


if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    _hurry_the_interpreter()
    _widen_bf16_of_products()


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def set_debug_mode(patch: pytest.MonkeyPatch, is_on: bool = True) -> None:
    """Check indices, as with PILOTLIGHT_DEBUG=1, or do not."""
    patch.setattr(checks, "DEBUG", is_on)


@pytest.fixture(autouse=True)
def _tensors_on_the_device_under_test() -> Iterator[None]:
    torch.manual_seed(5)  # random numbers are the same in every run
    with torch.device(DEVICE):
        yield


@pytest.fixture(autouse=True, params=BOTH if DEVICE == "cpu" else ["torch"])
def arithmetic(request: pytest.FixtureRequest) -> Iterator[str]:
    with computing_with(request.param):
        yield request.param

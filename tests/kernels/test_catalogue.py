"""Every operation of the catalogue in every form, compared with its formula in fp64, with unwritten memory poisoned.

The Triton forms run under Triton's interpreter where there is no GPU. There they are not tested in bf16, because the interpreter of Triton 3.6 to 3.9
computes with the bit patterns of bf16 numbers, which gives wrong results without an exception.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from load_tests.catalogue import OPERATIONS
from load_tests.catalogue.operation import Case, Operation, copied, in_double
from pilotlight.kernels.matrices.weight import Weight
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE

CALLS = [
    pytest.param(operation, case, dtype, id=f"{operation.name}-{case.name}-{str(dtype).removeprefix('torch.')}")
    for operation in OPERATIONS
    for case in operation.cases
    for dtype in operation.dtypes
]
# A type has the same effect in each call, so on a CPU only every second call is also interpreted in fp16.
HALVES = {(operation.name, case.name) for operation in OPERATIONS for case in operation.cases[::2]}
UNWRITTEN = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}  # make tensors of any content
OF_A_TYPE_OF_THEIR_OWN = {"quantise_fp8", "pool_pieces", "index_scores"}
INTERPRETED = [
    call
    for call, (operation, case, dtype) in ((call, call.values) for call in CALLS)
    if DEVICE == "cuda"
    or dtype == torch.float32
    or (dtype == torch.float16 and ((operation.name, case.name) in HALVES or torch.float32 not in operation.dtypes))
]


class Poisoning(TorchFunctionMode):
    """A mode that fills new memory with NaN, or a number that no formula gives, so that memory that a form does not write is detected."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function not in UNWRITTEN or made.dtype == torch.bool:
            return made
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max - 1)


@pytest.fixture(autouse=True)
def _poisoned() -> Iterator[None]:
    with Poisoning():
        yield


@pytest.mark.parametrize(("operation", "case", "dtype"), CALLS)
def test_the_form_that_the_engine_gets(operation: Operation, case: Case, dtype: torch.dtype) -> None:
    assert_keeps_its_promise(operation, operation.function, case, dtype)


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize(("operation", "case", "dtype"), INTERPRETED)
@pytest.mark.parametrize("arithmetic", ["torch"], indirect=True)  # the C library has no part in Triton's forms
def test_the_triton_form(operation: Operation, case: Case, dtype: torch.dtype) -> None:
    assert_keeps_its_promise(operation, operation.triton_form(), case, dtype)


def assert_keeps_its_promise(operation: Operation, form: Any, case: Case, dtype: torch.dtype) -> None:
    given = case.make(dtype)
    kept = copied(given)
    expected = operation.results(operation.reference, in_double(given))
    actual = operation.results(form, given)
    assert actual.keys() == expected.keys()
    for name, wanted in expected.items():
        got = actual[name]
        assert got.shape == wanted.shape, f"{name}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
        if name.startswith("result") and got.is_floating_point() and operation.name not in OF_A_TYPE_OF_THEIR_OWN:
            assert got.dtype == dtype, name
        if not wanted.is_floating_point():
            assert torch.equal(got, wanted), name
        elif got.numel():
            assert_close(name, wanted, got, operation.tolerance(dtype, got.dtype))
    for name in given.keys() - {*operation.changes, *operation.scratch}:
        assert unchanged(given[name], kept[name]), f"{name} was overwritten"


def unchanged(now: Any, before: Any) -> bool:
    if isinstance(now, torch.Tensor):  # compared as bytes, so that NaN equals itself
        return torch.equal(now.flatten().view(torch.uint8), before.flatten().view(torch.uint8))
    if isinstance(now, Weight):
        return all(map(unchanged, now.parts, before.parts))
    if isinstance(now, tuple):
        return all(map(unchanged, now, before))
    return bool(now == before)

"""The check for NaN and infinity finds them at any place, in each type, and in any memory layout."""

import pytest
import torch

from pilotlight.kernels.cpu.finite import is_finite

pytestmark = pytest.mark.cpu_only

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NO_NUMBERS = [float("nan"), float("inf"), -float("inf")]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 6, 42, 123, 431, 4096, 9001])
def test_one_value_that_is_no_number_is_found_wherever_it_is(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size).to(dtype)
    assert is_finite(values)
    for place in {0, size // 2, size - 1}:
        for wrong in NO_NUMBERS:
            spoilt = values.clone()
            spoilt[place] = wrong
            assert not is_finite(spoilt)
            assert is_finite(torch.cat([spoilt[:place], spoilt[place + 1 :]])), "its neighbours are numbers"


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_and_smallest_numbers_are_numbers(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.tiny, info.smallest_normal / 2, -0.0, 0.0]).to(dtype)
    assert is_finite(extremes.repeat(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_may_begin_at_any_byte_and_lie_apart(dtype: torch.dtype) -> None:
    store = torch.zeros(4099 * dtype.itemsize + 8, dtype=torch.uint8)
    for shift in range(0, 4 * dtype.itemsize, dtype.itemsize):
        values = store[shift : shift + 4099 * dtype.itemsize].view(dtype)
        values.fill_(1)
        values[7] = float("nan")
        assert not is_finite(values)
        assert not is_finite(values[1::2])
        assert is_finite(values[::2])


def test_integers_and_nothing_are_numbers() -> None:
    assert is_finite(torch.tensor([2**31 - 1, -1], dtype=torch.int32))
    assert is_finite(torch.empty(0))

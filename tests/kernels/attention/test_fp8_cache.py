"""An FP8 cache stores the nearest FP8 number of each value, and reading it is exact."""

import pytest
import torch

from pilotlight.kernels.attention.fp8_cache import FP8
from pilotlight.kernels.elementwise.qkv import rotate_and_cache

SCALES = (0.03, 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_stored_as_the_nearest_and_the_largest_where_they_are_larger(dtype: torch.dtype) -> None:
    qkv = torch.randn(6, 4, 8).to(dtype) * 10
    qkv[0, 3, 0] = torch.nan
    arena = torch.zeros(5, 2, 2, 4, 1, 8, dtype=FP8)
    slots = torch.randperm(20)[:6]
    angles = torch.zeros(6, 4)
    scales = torch.tensor(SCALES)
    values = qkv[:, 3].clone()
    rotate_and_cache(qkv, None, 0.0, angles.cos(), angles.sin(), arena[:, 1, 0], arena[:, 1, 1], slots, scales)
    stored = arena[:, 1, 1].float()[slots // 4, slots % 4, 0]
    expected = (values.float() / scales[1]).clamp(-448, 448).to(FP8).float()
    assert torch.equal(stored.isnan(), expected.isnan())
    assert torch.equal(stored.nan_to_num(), expected.nan_to_num())
    assert bool((arena[:, 1, 0].float().abs() == 448).any()), "keys from 13 on exceed the largest value of their scale"

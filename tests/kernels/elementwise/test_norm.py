import pytest
import torch

from pilotlight.kernels.elementwise.norm import add_rms_norm, rms_norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusing_the_residual_addition_changes_no_bit(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 42).to(dtype), torch.randn(5, 42).to(dtype), torch.randn(42).to(dtype)
    normalised, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert normalised.dtype == summed.dtype == dtype
    assert torch.equal(summed, x + residual)
    assert torch.equal(normalised, rms_norm(x + residual, weight, 1e-6))

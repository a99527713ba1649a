import pytest
import torch

from kernels.norm import add_rms_norm, head_rms_norm, rms_norm
from tests.closeness import assert_close


@pytest.mark.parametrize(("tokens", "hidden"), [(4, 64), (6, 431)])
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_rms_norm_divides_by_the_root_mean_square(tokens: int, hidden: int, dtype: torch.dtype, ratio: float) -> None:
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(hidden).to(dtype)
    exact = x.double()
    expected = exact / (exact.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert_close("norm", expected, actual, ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fusing_the_residual_addition_changes_no_bit(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(5, 42).to(dtype), torch.randn(5, 42).to(dtype), torch.randn(42).to(dtype)
    normalised, summed = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normalised, rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_heads_are_normalised_each_for_itself(dtype: torch.dtype, ratio: float) -> None:
    projected = torch.randn(6, 5, 10).to(dtype)
    x, weight = projected[:, :3], torch.randn(3, 10).to(dtype)  # heads of a fused projection: strided
    actual = head_rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    for head in range(3):
        assert_close(
            f"head {head}",
            rms_norm(x[:, head].cpu().double(), weight[head].cpu().double(), 1e-5),
            actual[:, head].cpu(),
            ratio,
        )

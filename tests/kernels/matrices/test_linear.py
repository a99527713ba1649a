"""Products with weights of ordinary and of awkward sizes; one row's result is independent of others."""

import pytest
import torch
import torch.nn.functional as F

from pilotlight.kernels.cpu import library
from pilotlight.kernels.elementwise.activation import clamped_swiglu, gelu_tanh_and_mul, silu_and_mul
from pilotlight.kernels.matrices.linear import gated_linear, linear, logits
from pilotlight.kernels.matrices.weight import GatedActivation
from tests.closeness import assert_close
from tests.cpu_kernels import C_LIBRARY

TYPES = [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)]
# Sizes that are multiples of every vector and tile; multiples of none; more columns than a block; a few columns; a single output.
SIZES = [(64, 128), (42, 123), (33, 2148), (431, 6), (1, 1031)]
# from 33 rows on a vector holds one number of each row: one to four vectors per panel, and two panels
ROWS = [1, 2, 3, 4, 5, 16, 33, 50, 131]


@pytest.mark.parametrize(("dtype", "ratio"), TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_linear_is_the_product_and_the_bias(outputs: int, inputs: int, dtype: torch.dtype, ratio: float) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        for given in (None, bias):
            expected = F.linear(x.double(), weight.double(), None if given is None else given.double())
            actual = linear(x, weight, given)
            assert actual.dtype == dtype
            assert_close(f"product of {rows} rows", expected, actual, ratio)


@pytest.mark.parametrize(("dtype", "ratio"), TYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul, lambda x: clamped_swiglu(x, 1.7, 7.0)])
def test_a_gated_product_is_its_steps_one_by_one(
    outputs: int, inputs: int, activation: GatedActivation, dtype: torch.dtype, ratio: float
) -> None:
    weight, bias = (torch.randn(2 * outputs, inputs) / inputs**0.5).to(dtype), torch.randn(2 * outputs).to(dtype)
    # With one output, gate and up are single sums whose terms may cancel, so their relative error is larger than the average over many outputs.
    tolerance = (4 if outputs > 1 else 40) * ratio
    for rows in (1, 3, 16, 93):
        x = torch.randn(rows, inputs).to(dtype)
        expected = activation(F.linear(x.cpu().double(), weight.cpu().double(), bias.cpu().double())).to(x.device)
        assert_close(f"gated, {rows} rows", expected, gated_linear(x, weight, bias, activation), tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_small_company(dtype: torch.dtype, arithmetic: str) -> None:
    if arithmetic == "torch" or library.loaded is None:
        pytest.skip("torch does not guarantee equal bits")
    rows = library.loaded.few_rows[dtype]
    x, weight = torch.randn(rows, 2148).to(dtype), torch.randn(2048, 2148).to(dtype)
    together = linear(x, weight)
    for size in range(1, rows):
        assert torch.equal(torch.cat([linear(part, weight) for part in x.split(size)]), together)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3)])
def test_in_a_larger_company_a_row_differs_by_rounding_alone(
    dtype: torch.dtype, tolerance: float, arithmetic: str
) -> None:
    if arithmetic == "torch" or library.loaded is None:
        pytest.skip("torch does not guarantee equal bits")
    rows = library.loaded.few_rows[dtype]
    x, weight = torch.randn(rows + 1, 700).to(dtype), torch.randn(2048, 700).to(dtype)
    larger, small = linear(x, weight)[:rows].double(), linear(x[:rows], weight).double()
    assert float((larger - small).norm() / small.norm()) < tolerance


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_larger_company(dtype: torch.dtype, arithmetic: str) -> None:
    if arithmetic == "torch":
        pytest.skip("torch does not guarantee equal bits")
    if library.loaded is None or library.loaded.most_rows[dtype] < 1320:
        pytest.skip("oneDNN computes this product on this machine")
    x, weight = torch.randn(1320, 2148).to(dtype), torch.randn(50, 2148).to(dtype)
    together = linear(x, weight)  # more rows than are multiplied with a block of the weight at a time
    for size in (33, 55, 110, 660):
        assert torch.equal(torch.cat([linear(part, weight) for part in x.split(size)]), together)


def test_threads_share_a_product_without_losing_a_part() -> None:
    x, weight = torch.randn(150, 700), torch.randn(900, 700)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = linear(x, weight)
    finally:
        torch.set_num_threads(before)
    assert_close("product", x.double() @ weight.double().T, together, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [5, 75])
def test_the_heads_logits_are_the_projection_in_fp32(rows: int, dtype: torch.dtype, arithmetic: str) -> None:
    hidden, weight = torch.randn(rows, 42).to(dtype), torch.randn(431, 42).to(dtype)
    actual = logits(hidden, weight)
    assert actual.dtype == torch.float32
    assert torch.equal(actual.to(dtype), linear(hidden, weight))
    if arithmetic == C_LIBRARY:
        assert_close("logits", hidden.double() @ weight.double().T, actual, 1e-6)


@pytest.mark.parametrize("rows", [6, 90])
def test_rows_may_be_strided(rows: int) -> None:
    wide, weight = torch.randn(rows, 300), torch.randn(42, 123)
    x = wide[:, 50:173]
    assert_close("product", x.double() @ weight.double().T, linear(x, weight), 1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 80])
def test_what_is_not_a_number_stays_visible(rows: int, bad: float, dtype: torch.dtype) -> None:
    x, weight = torch.randn(rows, 40).to(dtype), torch.randn(42, 40).to(dtype)
    x[1, 39] = bad
    weight[:, 39] = 0.0
    y = gated_linear(x, weight, None, silu_and_mul)
    assert bool(y[0].isfinite().all())
    assert bool(y[1].isnan().all())

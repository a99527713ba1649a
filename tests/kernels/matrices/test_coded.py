"""Products of the C library with weights in codes: exact except for the rounding of sums, rows independent of others, and recordable."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from load_tests.catalogue.matrices import plain_weight, random_int4, random_mxfp4
from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.cpu.recording import ProgramRecorder
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.matrices.coded import CodedWeight
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.int8 import Int8Weight, int8_linear, pad_int8
from pilotlight.kernels.moe import moe_experts
from tests.closeness import assert_close
from tests.cpu_kernels import C_LIBRARY

pytestmark = pytest.mark.cpu_only


def random_int8(rows: int, columns: int, group: int, scales: torch.dtype = torch.float32) -> Int8Weight:
    codes = torch.randint(-128, 128, (rows, columns)).to(torch.int8)
    return Int8Weight(pad_int8(codes), (torch.rand(rows, -(-columns // group)) + 0.5).to(scales), columns, group)


def double(weight: CodedWeight) -> Tensor:
    """Return the exact values, [rows, columns]."""
    if isinstance(weight, Int8Weight):
        scales = weight.scales.double().repeat_interleave(weight.group, -1)[:, : weight.columns]
        return weight.codes[:, : weight.columns].double() * scales
    if isinstance(weight, Int4Weight):
        weight = Int4Weight(weight.codes, weight.scales.double(), weight.zeros, weight.columns, weight.group)
    return plain_weight(weight).double()


# Rows of one block, of several, and of multiples of four; rows that end within a block and within a group; more columns than a chunk has.
WEIGHTS: dict[str, Callable[[torch.dtype], CodedWeight]] = {
    "int4 by 32": lambda scales: random_int4((42, 320), 32, zeros=False, dtype=scales),
    "int4 by 64, zeros": lambda scales: random_int4((33, 431), 64, zeros=True, dtype=scales),
    "int4 by 128": lambda scales: random_int4((131, 1024), 128, zeros=False, dtype=scales),
    "int4 by 128, zeros": lambda scales: random_int4((20, 1300), 128, zeros=True, dtype=scales),
    "int4 by row, zeros": lambda scales: random_int4((5, 77), 77, zeros=True, dtype=scales),
    "int8 by 32": lambda scales: random_int8(48, 320, 32, scales),
    "int8 by 128": lambda scales: random_int8(17, 1152, 128, scales),
    "int8 by row": lambda scales: random_int8(33, 431, 431, scales),
    "mxfp4": lambda scales: random_mxfp4((33, 1120)),
}
ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 50, 131, 600)


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("scales", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 1e-6), (torch.bfloat16, 2.5e-3)])
def test_a_product_is_that_of_the_exact_weight(
    name: str, scales: torch.dtype, dtype: torch.dtype, ratio: float, arithmetic: str
) -> None:
    """Only results in bf16 are rounded. Torch uses a weight unpacked to bf16 here, so its error is twice as large."""
    weight = WEIGHTS[name](scales)
    rows, columns = weight.shape
    bias = torch.randn(rows).to(dtype)
    for count in ROWS:
        x = torch.randn(count, columns + 3).to(dtype)[:, :columns]
        expected = x.double() @ double(weight).T + bias.double()
        assert_close("product", expected, weight.linear(x, bias), ratio * (1 if arithmetic == C_LIBRARY else 2))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_company(name: str, dtype: torch.dtype, arithmetic: str) -> None:
    if arithmetic != C_LIBRARY:
        pytest.skip("torch does not guarantee equal bits")
    weight = WEIGHTS[name](torch.float16)
    for together, sizes in ((8, (1, 2, 3, 5)), (600, (9, 50, 130, 300))):
        x = torch.randn(together, weight.shape[1]).to(dtype)
        expected = weight.linear(x)
        for size in sizes:
            parts = [weight.linear(part) for part in x.split(size)]
            # the last part may have fewer rows and take another path
            full = sum(part.shape[0] == size for part in parts) * size
            assert torch.equal(torch.cat(parts)[:full], expected[:full])


@pytest.mark.parametrize("name", ["int4 by 64, zeros", "int8 by row", "mxfp4"])
@pytest.mark.parametrize(("dtype", "ratio"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_blocks_of_any_size_keep_their_digits(name: str, dtype: torch.dtype, ratio: float) -> None:
    """All numbers of a row have similar magnitudes, except for a block of zeros."""
    weight = WEIGHTS[name](torch.float32)
    for size in (1e-20, 1e-3, 1.0, 1e20):
        x = (torch.randn(3, weight.shape[1]) * size).to(dtype)
        x[:, 32:64] = 0
        assert_close("product", x.double() @ double(weight).T, weight.linear(x), ratio)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_spoils_no_other(bad: float, dtype: torch.dtype, arithmetic: str) -> None:
    weight, x = random_int8(17, 96, 32), torch.randn(3, 96).to(dtype)
    good = weight.linear(x)
    x[1, 40] = bad
    found = weight.linear(x)
    assert not found[1].isfinite().any()
    if arithmetic == C_LIBRARY:
        assert torch.equal(found[::2], good[::2])


def test_logits_are_the_projection_in_fp32(arithmetic: str) -> None:
    weight, x = random_int8(50, 64, 32), torch.randn(3, 64).bfloat16()
    logits = weight.logits(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits.bfloat16(), weight.linear(x))
    if arithmetic == C_LIBRARY:
        assert_close("logits", x.double() @ double(weight).T, logits, 1e-6)


def test_columns_in_an_order_of_importance_are_found() -> None:
    weight = random_int4((20, 256), 128, zeros=True, dtype=torch.float32)
    order = torch.randperm(256)
    sorted_weight = Int4Weight(weight.codes, weight.scales, weight.zeros, 256, 128, order)
    x = torch.randn(4, 256)
    assert_close("product", x.double()[:, order] @ double(weight).T, sorted_weight.linear(x), 1e-6)


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_a_step_with_weights_in_codes_is_recorded(rows: int, arithmetic: str) -> None:
    if arithmetic != C_LIBRARY:
        pytest.skip("programs are the C library's")
    up, down = random_int4((192, 64), 32, zeros=True, dtype=torch.bfloat16), random_int8(64, 96, 96)
    x = torch.randn(rows, 64).bfloat16()
    recorder = ProgramRecorder(torch.bfloat16)

    def forward() -> tuple[Tensor, ...]:
        hidden = up.gated(x, None, silu_and_mul)
        return down.linear(hidden), down.logits(hidden)

    if not recorder.takes(rows):
        pytest.skip("oneDNN computes products of so many rows here")
    with torch.inference_mode():
        program = recorder.record(forward)
        for _ in range(3):
            x.copy_(torch.randn(rows, 64))
            for output in program.output:
                output.fill_(torch.nan)
            program.replay()
            for mine, theirs in zip(program.output, forward(), strict=True):
                assert torch.equal(mine, theirs)


def test_experts_in_codes_are_those_that_their_numbers_stand_for() -> None:
    gate_up, down = (
        random_int4((3 * rows, 64), 32, zeros=True, dtype=torch.float32).by_expert(3) for rows in (128, 64)
    )
    x, ids = torch.randn(11, 64), torch.randint(0, 3, (11, 1))
    weights = torch.ones(11, 1)
    found = moe_experts(x, weights, ids, gate_up, down, silu_and_mul)
    for i in range(11):
        expert = int(ids[i])
        hidden = silu_and_mul(x[i : i + 1] @ gate_up.expert(expert).unpack(torch.float32).T)
        assert_close("token", (hidden @ down.expert(expert).unpack(torch.float32).T).double(), found[i : i + 1], 1e-5)


def test_products_name_what_they_cannot_compute() -> None:
    good, x = random_int8(5, 64, 32), torch.randn(2, 64)
    for bad, words in (
        (Int8Weight(good.codes.int(), good.scales, 64, 32), "weight.codes has dtype int32, wanted int8"),
        (Int8Weight(good.codes, good.scales, 96, 32), "weight.columns is 96, and columns = 64 as x has it"),
        (Int8Weight(good.codes, good.scales, 64, 24), "weight.group is 24, wanted a multiple of 32"),
        (Int8Weight(good.codes, torch.ones(5, 1), 64, 32), r"weight.scales has shape \[5, 1\]"),
    ):
        with pytest.raises(ArgumentError, match=f"^int8_linear: {words}"):
            int8_linear(x, bad)

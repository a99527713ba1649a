"""Weights in a GGUF file's blocks have the values that llama.cpp's own package computes.

Products with them are exact except for the rounding of x, for any kind, any number of rows and any number of joined matrices.
"""

import hashlib

import gguf
import numpy as np
import pytest
import torch

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.elementwise.activation import silu_and_mul
from pilotlight.kernels.matrices.blocks import BLOCK_KINDS, BlockWeight, block_linear, rounded, row_bytes, unpack
from tests.engine.gguf.files import Kind, random_blocks

pytestmark = pytest.mark.cpu_only
KINDS = list(BLOCK_KINDS)
ROUNDED = 1 / 254  # largest error of a rounded value of x, relative to the largest of its 32 values

DIGESTS = {
    "q4_0": "49a902a51879", "q4_1": "627f358d9672", "q5_0": "72589bf6244b", "q5_1": "a54753298ff9", "q8_0": "6e4ce0e5580d",
    "iq4_nl": "5f70818302c2", "q3_k": "b70078840db4", "q4_k": "edc8da49725c", "q5_k": "42a613ea2b21", "q6_k": "ba8b91ae3df1", "mxfp4": "d0bd11ff77d1",
}  # fmt: skip


def blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    return torch.from_numpy(random_blocks(getattr(Kind, kind.upper()), rows, columns))


def numbers(kind: str, stored: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), getattr(Kind, kind.upper())))


def bound(x: torch.Tensor, weight: torch.Tensor, share: float) -> torch.Tensor:
    """Return the largest errors [rows, outputs] of a product if x is off by `share` of the largest of each 32 values, and the weight by 2^-8."""
    x, weight = x.double().abs(), weight.double().abs()
    largest = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).unflatten(1, (-1, 32)).amax(2)
    off = largest.repeat_interleave(32, 1)[:, : x.shape[1]] * share
    return off @ weight.T + 2**-8 * (x @ weight.T) + 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_decoded_to_the_bit(kind: str) -> None:
    stored = blocks(kind, 9, 2304 if kind.endswith("_k") else 2336)
    weight = BlockWeight.joined([stored], [kind], numbers(kind, stored).shape[1])
    assert torch.equal(weight.unpack(torch.float32), numbers(kind, stored))
    wanted = torch.tensor([8, 0, 3, 3])
    assert torch.equal(weight.rows(wanted, torch.float32), numbers(kind, stored)[wanted])
    assert torch.equal(weight.rows(wanted, torch.float32, 3.0), 3 * numbers(kind, stored)[wanted])
    in_bf16 = weight.rows(wanted, torch.bfloat16).float()
    assert torch.allclose(in_bf16, numbers(kind, stored)[wanted].bfloat16().float(), rtol=0, atol=1e-30)


def test_every_power_of_mxfp4_is_decoded_to_the_bit() -> None:
    stored = blocks("mxfp4", 252, 32)  # under larger powers than 2^124, the largest values are infinite
    stored[:, 0] = torch.arange(252)
    weight = BlockWeight.joined([stored], ["mxfp4"], 32)
    assert torch.equal(weight.unpack(torch.float32), numbers("mxfp4", stored))
    assert torch.equal(weight.rows(torch.arange(252), torch.float32), numbers("mxfp4", stored))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_off_by_no_more_than_x_is_rounded(kind: str, dtype: torch.dtype) -> None:
    columns = 512 if kind.endswith("_k") else 416
    stored = blocks(kind, 35, columns)
    weight, plain = BlockWeight.joined([stored], [kind], columns), numbers(kind, stored)
    for rows in (1, 2, 3, 4, 7, 8, 9, 17, 40, 130):
        x = torch.randn(rows, columns).to(dtype)
        bias = torch.randn(35).to(dtype)
        exact = x.double() @ plain.double().T + bias.double()
        off = (weight.linear(x, bias).double() - exact).abs()
        allowed = bound(x, plain, ROUNDED) + (2**-8 * exact.abs() if dtype == torch.bfloat16 else 0)
        assert (off <= allowed).all(), (rows, float((off / allowed).max()))
        logits = weight.logits(x)
        assert logits.dtype == torch.float32
        assert ((logits.double() - exact + bias.double()).abs() <= allowed + 2**-8 * exact.abs()).all()


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_what_x_is_rounded_to(kind: str) -> None:
    stored = blocks(kind, 35, 512)
    weight, plain = BlockWeight.joined([stored], [kind], 512), numbers(kind, stored).double()
    x = torch.randn(130, 512)
    x[3, 64:96] = 0
    x[5, 32:64] *= 2.0**-110
    values = rounded(x)
    assert ((values - x).abs() <= 1.01 * ROUNDED * x.abs().amax(1, keepdim=True)).all()
    for rows in (1, 5, 130):
        off = (weight.linear(x[:rows]).double() - values[:rows].double() @ plain.T).abs()
        # a value of x halfway between two steps may be rounded up or down
        allowed = bound(x[:rows], plain, 0) * 2**-8 + 2 * ROUNDED * x.abs().max() * plain.abs().max()
        assert (off <= allowed).all()
        assert off.median() <= 2**-20 * plain.abs().max() * 512


def test_matrices_of_several_kinds_are_one_below_the_other() -> None:
    kinds, heights = ("q4_k", "q6_k", "q8_0"), (33, 18, 5)
    stored = [blocks(kind, rows, 768) for kind, rows in zip(kinds, heights, strict=True)]
    weight = BlockWeight.joined(stored, kinds, 768)
    plain = torch.cat([numbers(kind, part) for kind, part in zip(kinds, stored, strict=True)])
    assert weight.shape == (56, 768)
    assert torch.equal(weight.unpack(torch.float32), plain)
    assert torch.equal(weight.rows(torch.tensor([40, 2, 55]), torch.float32), plain[[40, 2, 55]])
    for rows in (1, 3, 20):
        x = torch.randn(rows, 768)
        assert ((weight.linear(x).double() - x.double() @ plain.double().T).abs() <= bound(x, plain, ROUNDED)).all()


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize("heights", [(40,), (20, 20)])
def test_gates_and_ups_are_fused_with_their_activation(rows: int, heights: tuple[int, ...]) -> None:
    stored = [blocks("q4_1", height, 320) for height in heights]
    weight = BlockWeight.joined(stored, ["q4_1"] * len(stored), 320)
    x = torch.randn(rows, 320) * 0.1
    assert torch.allclose(weight.gated(x, None, silu_and_mul), silu_and_mul(weight.linear(x)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_company(kind: str, dtype: torch.dtype, arithmetic: str) -> None:
    """Test whole chunks of 1,024 columns, whole vectors of outputs, and the rest of both."""
    if arithmetic == "torch":
        pytest.skip("torch's order of summation depends on the number of rows")
    columns = 1280 if kind.endswith("_k") else 1120
    weight = BlockWeight.joined([blocks(kind, 25, columns), blocks(kind, 25, columns)], [kind, kind], columns)
    x, bias = torch.randn(130, columns).to(dtype), torch.randn(50).to(dtype)
    for product in (
        lambda x: weight.linear(x),
        lambda x: weight.linear(x, bias),
        weight.logits,
        lambda x: weight.gated(x, bias, silu_and_mul),
    ):
        together = product(x)
        for rows in (1, 2, 3, 5, 9, 12, 16, 31, 49):
            first = 130 - rows
            assert torch.equal(product(x[first:]), together[first:]), rows


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_same_bits_on_every_kind_of_cpu(kind: str, arithmetic: str) -> None:
    """All five kinds of CPU have the same digests; one run tests the kind of PILOTLIGHT_CPU."""
    if arithmetic == "torch":
        pytest.skip("torch sums in another order")
    weight = BlockWeight.joined([blocks(kind, 21, 512)], [kind], 512)
    x = torch.from_numpy(np.random.default_rng(3).integers(-999, 1000, (19, 512)).astype(np.float32)) / 64
    assert hashlib.sha256(weight.linear(x).numpy().tobytes()).hexdigest()[:12] == DIGESTS[kind]


@pytest.mark.parametrize("rows", [1, 12])
def test_a_value_that_is_no_number_spoils_its_own_row_alone(rows: int) -> None:
    weight = BlockWeight.joined([blocks("q6_k", 20, 256)], ["q6_k"], 256)
    x = torch.randn(rows + 1, 256)
    x[0, 77] = float("inf")
    y = weight.linear(x)
    assert not y[0].isfinite().any()
    assert y[1:].isfinite().all()


def test_a_row_that_is_not_there_is_no_number(arithmetic: str) -> None:
    if arithmetic == "torch":
        pytest.skip("torch raises")
    weight = BlockWeight.joined([blocks("q4_0", 20, 64)], ["q4_0"], 64)
    assert weight.rows(torch.tensor([3, 20]), torch.float32)[1].isnan().all()


def _wrong(good: torch.Tensor) -> list[tuple[BlockWeight, str]]:
    return [
        (BlockWeight(good.int(), None, None, ("q4_0",), 64), "weight.first has dtype int32, wanted uint8"),
        (BlockWeight(good, None, None, ("q4_0",), 96), "weight.columns is 96, and columns = 64 as x has it"),
        (BlockWeight(good, None, None, ("q4_1",), 64), r"weight.first has shape .* weight.bytes0 = 40"),
        (BlockWeight(good, None, None, ("q9_9",), 64), "weight.kinds has 'q9_9'"),
        (BlockWeight(good, None, None, ("q4_k",), 64), "weight.columns is 64, wanted a multiple of 256"),
        (BlockWeight(good, good, None, ("q4_0",), 64), "weight.kinds are 1, and there are 2 matrices"),
    ]


@pytest.mark.parametrize("number", range(6))
def test_a_weight_whose_parts_do_not_agree_is_refused_by_name(number: int) -> None:
    weight, why = _wrong(blocks("q4_0", 8, 64))[number]
    with pytest.raises(ArgumentError, match=why):
        block_linear(torch.randn(2, 64), weight)


def test_kinds_have_the_sizes_of_llama_cpp() -> None:
    for kind, (columns, num_bytes) in BLOCK_KINDS.items():
        assert (columns, num_bytes) == gguf.GGML_QUANT_SIZES[getattr(Kind, kind.upper())]
        assert row_bytes(kind, 512) == 512 // columns * num_bytes
        assert unpack(kind, blocks(kind, 2, 256)).shape == (2, 256)

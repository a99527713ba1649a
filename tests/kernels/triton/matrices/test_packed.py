"""Products of a few rows with four-bit weights beyond the catalogue: columns are in order, and rows do not depend on others."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from load_tests.catalogue.matrices import random_int4, random_mxfp4
from pilotlight.kernels.matrices.int4 import Int4Weight
from pilotlight.kernels.matrices.mxfp4 import Mxfp4Weight
from pilotlight.kernels.triton.launch import num_processors
from pilotlight.kernels.triton.matrices import packed
from pilotlight.kernels.triton.matrices.packed import Strip
from tests.closeness import assert_close
from tests.kernels.conftest import DEVICE

# the interpreter's results in bf16 are wrong
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
STRIPS = [Strip(16, 1, 2), Strip(16, 2, 1)]


def weights() -> list[Int4Weight | Mxfp4Weight]:
    wide = random_int4((21, 160), 128, zeros=True, dtype=DTYPE)
    return [
        random_int4((21, 160), 128, zeros=False, dtype=DTYPE),
        wide,
        replace(wide, scales=wide.scales.float()),
        random_int4((21, 160), 64, zeros=True, dtype=DTYPE),
        random_int4((21, 160), 32, zeros=False, dtype=DTYPE),
        random_int4((21, 77), 77, zeros=True, dtype=DTYPE),
        random_mxfp4((21, 160)),
    ]


@pytest.mark.long
@pytest.mark.parametrize(("strip", "some"), [(STRIPS[0], slice(None)), (STRIPS[1], slice(2, None, 4))])
def test_one_in_a_column_gives_the_weight_of_that_column(strip: Strip, some: slice) -> None:
    for weight in weights()[some]:
        plain = weight.unpack(DTYPE)
        for first in range(0, weight.columns, 16):
            x = torch.zeros(16, weight.columns, dtype=DTYPE)
            columns = range(first, min(first + 16, weight.columns))
            for i, column in enumerate(columns):
                x[i, column] = 1
            product = packed.product(x, weight.operands(), None, strip)
            assert torch.equal(product[: len(columns)], plain[:, first : first + 16].T)


@pytest.mark.long
@pytest.mark.parametrize("strip", STRIPS)
def test_a_row_has_the_same_bits_in_any_company(strip: Strip) -> None:
    for weight in weights()[2::2]:
        x = torch.randn(16, weight.columns).to(DTYPE)
        together = packed.product(x, weight.operands(), None, strip)
        for some in (x[:1], x[:7]):
            assert torch.equal(packed.product(some, weight.operands(), None, strip), together[: len(some)])
        assert torch.equal(packed.product(x[11:12], weight.operands(), None, strip), together[11:12])


def test_rows_of_x_may_begin_anywhere() -> None:
    weight = random_int4((21, 160), 64, zeros=True, dtype=DTYPE)
    x = torch.randn(3, 160).to(DTYPE)
    expected = packed.product(x, weight.operands(), None)
    for start, wide in ((1, 162), (1, 161), (0, 161), (2, 170)):
        elsewhere = torch.zeros(3, wide, dtype=DTYPE)[:, start : start + 160]
        elsewhere.copy_(x)
        assert torch.equal(packed.product(elsewhere, weight.operands(), None), expected)


@pytest.mark.long
def test_a_weight_that_is_decoded_into_memory_is_the_unpacked_one() -> None:
    for weight in weights():
        rows, columns = weight.shape
        if columns % 32 == 0:
            decoded = torch.empty(13, columns, dtype=DTYPE)
            packed.decode_rows(weight.operands(), decoded, 5)
            assert torch.equal(decoded, weight.unpack(DTYPE)[5:18])
        x, bias = torch.randn(packed.MOST_TOKENS + 1, columns).to(DTYPE), torch.randn(rows).to(DTYPE)
        expected = x.double() @ weight.unpack(torch.float32).double().T
        scratch_bytes = 8 * columns * DTYPE.itemsize  # three parts of 8, 8 and 5 rows
        for given in (None, bias):
            product = packed.product(x, weight.operands(), given, scratch_bytes=scratch_bytes)
            wanted = expected if given is None else expected + given.double()
            assert_close("product", wanted, product, 4 * torch.finfo(DTYPE).eps)


@pytest.mark.parametrize("scale", [20, 113, 127, 139])
def test_every_scale_and_code_of_mxfp4_is_exact(scale: int) -> None:
    """Values outside the range of the type are left out."""
    codes = torch.arange(256).to(torch.uint8).reshape(16, 16)
    weight = Mxfp4Weight(codes, torch.full((16, 1), scale, dtype=torch.uint8))
    expected = weight.unpack(torch.float32)
    fits = expected.abs() <= torch.finfo(DTYPE).max
    x = torch.eye(32, dtype=DTYPE)
    products = [packed.product(x[i : i + 16], weight.operands(), None) for i in (0, 16)]
    assert torch.equal(torch.cat(products).T[fits], expected.to(DTYPE)[fits])


def test_one_row_that_lies_oddly_is_read_whole() -> None:
    weight, x = random_int4((5, 64), 64, zeros=False, dtype=DTYPE), torch.randn(1, 67).to(DTYPE)[:, :64]
    assert torch.equal(packed.product(x, weight.operands(), None), packed.product(x.clone(), weight.operands(), None))


def test_more_tokens_than_a_program_takes_go_to_several() -> None:
    weight, x = random_int4((21, 160), 32, zeros=True, dtype=DTYPE), torch.randn(packed.MOST_TOKENS + 9, 160).to(DTYPE)
    strip = packed.strip_for(len(x), 21, num_processors(x.device))
    together = packed.product(x, weight.operands(), None, strip)
    for first in (0, packed.MOST_TOKENS):
        some = x[first : first + packed.MOST_TOKENS]
        assert torch.equal(packed.product(some, weight.operands(), None), together[first : first + len(some)])


@pytest.mark.parametrize("rows", [1, 1024, 4096, 28672])
def test_a_program_fits_a_processors_registers(rows: int) -> None:
    strips = {tokens: packed.strip_for(tokens, rows, 132) for tokens in range(1, packed.MOST_TOKENS + 1)}
    assert all(tokens <= strip.tokens for tokens, strip in strips.items())
    assert len({strip.warps for strip in strips.values()}) == 1, "the order of sums depends on no tokens"
    for strip in strips.values():
        assert 32 * strip.warps * packed.REGISTERS[strip.tokens, strip.tiles] <= 65536

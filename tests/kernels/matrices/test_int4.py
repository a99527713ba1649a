"""The layout of four-bit weights, its inverse, and refusals of products with it."""

from dataclasses import replace

import pytest
import torch

from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.matrices.fp8 import Fp8Weight, fp8_linear, quantise_fp8, unpack_fp8
from pilotlight.kernels.matrices.int4 import Int4Weight, int4_linear, pack_int4, unpack_codes
from pilotlight.kernels.matrices.mxfp4 import Mxfp4Weight, mxfp4_linear, repack_mxfp4, unpack_mxfp4, unpack_mxfp4_weight
from pilotlight.kernels.matrices.weight import Weight


@pytest.mark.parametrize("columns", [1, 16, 31, 32, 42, 431])
def test_codes_come_back_as_they_were_packed(columns: int) -> None:
    codes = torch.randint(0, 16, (2, 3, columns), dtype=torch.uint8)
    packed = pack_int4(codes)
    assert packed.shape == (2, 3, -(-columns // 32) * 16)
    assert torch.equal(unpack_codes(packed, columns), codes)


def test_a_byte_holds_columns_that_are_sixteen_apart() -> None:
    packed = pack_int4(torch.arange(32).unsqueeze(0) % 16)
    assert packed[0].tolist() == [j | j << 4 for j in range(16)]
    assert pack_int4(torch.tensor([[1] * 16 + [2] * 16]))[0].tolist() == [0x21] * 16


def test_repacked_mxfp4_has_the_same_values() -> None:
    blocks, scales = torch.randint(0, 256, (5, 3, 16)).byte(), torch.randint(0, 250, (5, 3)).byte()
    expected = torch.empty(5, 96)
    unpack_mxfp4(blocks, scales, expected)
    assert torch.equal(unpack_mxfp4_weight(Mxfp4Weight(repack_mxfp4(blocks), scales), torch.float32), expected)


def test_a_permuted_weight_is_unpacked_in_the_models_order() -> None:
    permutation = torch.randperm(42)
    sorted_columns = Int4Weight(pack_int4(torch.randint(0, 16, (42, 42)).byte()), torch.rand(42, 1), None, 42, 64)
    weight = replace(sorted_columns, permutation=permutation)
    unpacked = weight.unpack(torch.float32)
    assert torch.equal(unpacked[:, permutation], sorted_columns.unpack(torch.float32))
    x = torch.randn(3, 42)
    assert torch.allclose(weight.linear(x), x @ unpacked.T, atol=1e-4 * float(unpacked.abs().sum(1).max()))


def test_an_experts_weight_is_its_part_of_the_whole() -> None:
    codes = torch.randint(0, 256, (3, 6, 16)).byte()
    weights: list[Weight] = [
        Int4Weight(codes, torch.rand(3, 6, 1), torch.randint(0, 16, (3, 6, 1)).byte(), 32, 32),
        Int4Weight(codes, torch.rand(3, 6, 1), None, 32, 32),
        Mxfp4Weight(codes, torch.randint(120, 130, (3, 6, 1)).byte()),
        Fp8Weight(torch.randn(3, 6, 32).to(torch.float8_e4m3fn), torch.rand(3, 2, 1), 4, 32),
    ]
    for weight in weights:
        whole = weight.unpack(torch.float32)
        for i in range(3):
            assert torch.equal(weight.expert(i).unpack(torch.float32), whole[i])


def test_fp8_scales_are_those_of_a_values_block() -> None:
    weight = Fp8Weight(torch.ones(5, 300).to(torch.float8_e4m3fn), torch.arange(9.0).view(3, 3), 2, 128)
    plain = unpack_fp8(weight, torch.float32)
    assert plain[0, 0] == 0.0
    assert plain[1, 127] == 0.0
    assert plain[1, 128] == 1.0
    assert plain[4, 299] == 8.0


def test_activations_beyond_a_measured_range_are_cut_off() -> None:
    values, scales = quantise_fp8(torch.tensor([[1000.0, -1000.0, 0.5]]), 3, torch.tensor([1.0]))
    assert values.float().tolist() == [[448.0, -448.0, 0.5]]
    assert scales.tolist() == [[1.0]]


def test_products_name_what_they_cannot_compute() -> None:
    x, codes = torch.randn(2, 64), torch.zeros(5, 32).byte()
    good = Int4Weight(codes, torch.ones(5, 2), None, 64, 32)
    for bad, words in (
        (replace(good, codes=codes.int()), "weight.codes has dtype int32, wanted uint8"),
        (replace(good, columns=96), "weight.columns is 96, and columns = 64 as x has it"),
        (replace(good, group=24), "weight.group is 24, wanted a multiple of 32"),
        (replace(good, scales=torch.ones(5, 1)), r"weight.scales has shape \[5, 1\]"),
        (replace(good, codes=codes.T.contiguous().T), "weight.codes has stride 5 in dimension 1, wanted 1"),
    ):
        with pytest.raises(ArgumentError, match=f"^int4_linear: {words}"):
            int4_linear(x, bad)
    with pytest.raises(ArgumentError, match=r"^int4_linear: bias has shape \[4\], wanted \[rows\] with rows = 5"):
        int4_linear(x, good, torch.zeros(4))
    with pytest.raises(ArgumentError, match=r"^mxfp4_linear: weight.columns is 32, and columns = 64 as x has it"):
        mxfp4_linear(x, Mxfp4Weight(codes, torch.zeros(5, 1).byte()))
    values = torch.zeros(5, 64).to(torch.float8_e4m3fn)
    for weight, words in (
        (Fp8Weight(values, torch.ones(1, 1), 5, 60), "weight.column_group is 60"),
        (Fp8Weight(values, torch.ones(2, 1), 5, 64), r"weight.scales has shape \[2, 1\]"),
        (Fp8Weight(values.float(), torch.ones(1, 1), 5, 64), "weight.values has dtype float32"),
    ):
        with pytest.raises(ArgumentError, match=f"^fp8_linear: {words}"):
            fp8_linear(x, weight)
    assert torch.equal(fp8_linear(x, Fp8Weight(values, torch.ones(1, 1), 5, 64)), torch.zeros(2, 5))


def test_packing_leaves_the_order_of_transposed_codes_behind() -> None:
    codes = torch.randint(16, (70, 5), dtype=torch.uint8)
    packed = pack_int4(codes.T)
    assert packed.is_contiguous()
    assert torch.equal(unpack_codes(packed, 70), codes.T)

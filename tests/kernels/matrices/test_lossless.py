"""Weights of 12 bits equal bf16 bit by bit: when unpacked, and in results."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from load_tests.catalogue.matrices import random_lossless
from pilotlight.kernels.checks import ArgumentError
from pilotlight.kernels.elementwise.activation import clamped_swiglu, silu_and_mul
from pilotlight.kernels.matrices.lossless import (
    GROUP,
    LosslessWeight,
    Survey,
    encode_lossless,
    lossless_linear,
    lossless_rows,
    pack_lossless,
    row_bytes,
)
from pilotlight.kernels.matrices.plain import PlainWeight
from tests.cpu_kernels import BOTH, computing_with

EMBER = Path(__file__).parents[3] / "engine/embedded/ember"
ALL_VALUES = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def trained(rows: int, columns: int, *, outliers: int = 0) -> torch.Tensor:
    """Return normally distributed weights whose rows have different scales, with a few outliers."""
    plain = torch.randn(rows, columns) * torch.rand(rows, 1).exp() / columns**0.5
    for _ in range(outliers):
        plain[torch.randint(rows, ()), torch.randint(columns, ())] *= 2.0 ** int(torch.randint(-60, 60, ()))
    return plain.to(torch.bfloat16)


def bits(values: torch.Tensor) -> list[list[int]]:
    return values.contiguous().view(torch.int16).tolist()  # compared as bits, because NaN does not equal itself


@pytest.mark.cpu_only
def test_all_65536_values_come_back() -> None:
    for columns in (GROUP, 1000, 1 << 16):
        plain = torch.nn.functional.pad(ALL_VALUES, (0, -(1 << 16) % columns)).view(-1, columns)
        shuffled = plain.flatten()[torch.randperm(plain.numel())].view(plain.shape)
        for weight in (plain, shuffled):
            assert bits(pack_lossless(weight).unpack(torch.bfloat16)) == bits(weight)


@pytest.mark.parametrize(("rows", "columns", "escapes"), [(24, 256, 7), (8, 1024, 1), (16, 4096, 32)])
def test_a_weight_that_a_benchmark_makes_up_is_one_that_packing_makes(rows: int, columns: int, escapes: int) -> None:
    made_up = random_lossless(rows, columns, escapes)
    again = replace(made_up, codes=torch.zeros_like(made_up.codes), escapes=torch.zeros_like(made_up.escapes))
    encode_lossless(made_up.unpack(torch.bfloat16), again)
    assert torch.equal(again.codes, made_up.codes), "an escape has index 0 of its palette"
    assert torch.equal(again.escapes, made_up.escapes)


@pytest.mark.parametrize("columns", [1, 64, 65, 128, 704, 1030, 2177])
@pytest.mark.parametrize("rows", [1, 7, 8, 41])
def test_weights_come_back_whole_and_by_rows(rows: int, columns: int) -> None:
    plain = trained(rows, columns, outliers=9)
    weight = pack_lossless(plain)
    assert weight.codes.shape == (rows, row_bytes(columns))
    assert bits(weight.unpack(torch.bfloat16)) == bits(plain)
    assert torch.equal(weight.unpack(torch.float32), plain.float())
    numbers = torch.randint(rows, (5,))
    assert bits(lossless_rows(numbers, weight, torch.bfloat16)) == bits(plain[numbers])
    assert torch.equal(weight.rows(numbers, torch.float32, 3.0), plain[numbers].float() * 3.0)
    assert bits(weight.rows(numbers, torch.bfloat16, 0.3)) == bits(
        PlainWeight(plain).rows(numbers, torch.bfloat16, 0.3)
    )


@pytest.mark.cpu_only
@given(
    st.integers(0, 1 << 32), st.integers(1, 20), st.integers(1, 700), st.sampled_from(["any", "few", "one", "trained"])
)
def test_whatever_the_bits_are_they_come_back(seed: int, rows: int, columns: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(1 << 15), 1 << 15, (rows, columns), generator=generator, dtype=torch.int16)
    if kind == "few":
        words = words & torch.tensor(0x07FF, dtype=torch.int16)
    elif kind == "one":
        words = torch.full_like(words, int(words[0, 0]))
    elif kind == "trained":
        words = torch.randn(rows, columns, generator=generator).to(torch.bfloat16).view(torch.int16)
    plain = words.view(torch.bfloat16)
    assert bits(pack_lossless(plain).unpack(torch.bfloat16)) == bits(plain)


def test_both_forms_write_the_same_bytes() -> None:
    infinite = trained(16, 128)
    infinite[:9] = torch.inf
    for plain in (trained(43, 391, outliers=30), infinite):
        found = []
        for kind in BOTH:
            with computing_with(kind):
                found.append(pack_lossless(plain))
        assert all(torch.equal(a, b) for one in found for a, b in zip(one.parts, found[0].parts, strict=True))


def test_trained_weights_take_three_quarters_of_their_bytes() -> None:
    plain = trained(512, 896)
    assert pack_lossless(plain).num_bytes == Survey.of(plain).num_bytes <= 0.76 * plain.nbytes
    assert Survey.of(plain).num_escapes < plain.numel() / 1000


@pytest.mark.cpu_only
def test_a_trained_models_matrices_take_24_percent_less() -> None:
    plain = coded = 0
    for file in EMBER.glob("*.safetensors"):
        matrices = [tensor for tensor in load_file(file, "cpu").values() if tensor.dim() == 2]
        plain += sum(matrix.nbytes for matrix in matrices)
        coded += sum(Survey.of(matrix).num_bytes for matrix in matrices)
    assert plain
    assert 1 - coded / plain >= 0.24


def test_what_stands_for_escapes_is_a_number() -> None:
    plain = trained(16, 300)
    plain[:7] = -torch.inf
    plain[8:15] = 3e38
    weight = pack_lossless(plain)
    assert all(first & 0x7F != 0x7F for first in weight.palettes[:, 0].tolist())
    assert bits(weight.unpack(torch.bfloat16)) == bits(plain)
    everywhere = torch.full((8, 128), torch.inf).to(torch.bfloat16)
    assert bits(pack_lossless(everywhere).unpack(torch.bfloat16)) == bits(everywhere)


def test_random_bits_are_nearly_all_escapes() -> None:
    words = torch.randint(-(1 << 15), 1 << 15, (16, 512)).to(torch.int16)
    survey = Survey.of(words.view(torch.bfloat16))
    assert survey.num_escapes > 0.8 * words.numel()
    assert survey.num_bytes > 2 * words.numel()  # so the weight is kept plain


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columns", [96, 128, 704, 896, 1030, 1600])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 7, 24, 25, 64, 130])
def test_products_have_the_bits_of_the_plain_weights(tokens: int, columns: int, dtype: torch.dtype) -> None:
    plain, bias = trained(2 * 37, columns, outliers=25), torch.randn(74).to(dtype)
    coded, same = pack_lossless(plain), PlainWeight(plain.to(dtype))
    x = torch.randn(tokens, columns).to(dtype)
    assert torch.equal(coded.linear(x, bias), same.linear(x, bias))
    assert torch.equal(coded.gated(x, bias, silu_and_mul), same.gated(x, bias, silu_and_mul))
    assert torch.equal(coded.logits(x), same.logits(x))


@pytest.mark.cpu_only
@pytest.mark.parametrize("tokens", [1, 30])
def test_an_activation_that_the_c_library_lacks_follows_the_product(tokens: int) -> None:
    plain, x = trained(2 * 37, 704, outliers=25), torch.randn(tokens, 704)
    activation = partial(clamped_swiglu, alpha=1.7, limit=7.0)
    expected = PlainWeight(plain.float()).gated(x, None, activation)
    assert torch.equal(pack_lossless(plain).gated(x, None, activation), expected)


@pytest.mark.cpu_only
def test_products_of_more_rows_than_a_pass_takes_have_the_same_bits() -> None:
    plain, x = trained(50, 1152), torch.randn(1200, 1152).to(torch.bfloat16)
    assert torch.equal(pack_lossless(plain).linear(x), PlainWeight(plain).linear(x))


@pytest.mark.cpu_only
def test_infinity_and_nan_in_a_weight_reach_their_outputs_alone() -> None:
    plain = trained(40, 300)
    plain[3, 7], plain[9, 299], plain[20, 0] = torch.inf, torch.nan, -torch.inf
    x = torch.rand(2, 300).to(torch.bfloat16) + 1
    y = pack_lossless(plain).linear(x)
    assert y[:, 3].isposinf().all()
    assert y[:, 9].isnan().all()
    assert y[:, 20].isneginf().all()
    assert y.isfinite().sum() == 2 * 37


def test_an_experts_weight_is_its_part_of_the_whole() -> None:
    plain = trained(3 * 16, 200, outliers=20)
    weight = pack_lossless(plain).by_expert(3)
    assert weight.shape == (3, 16, 200)
    assert bits(weight.unpack(torch.bfloat16).flatten(0, 1)) == bits(plain)
    for i in range(3):
        assert bits(weight.expert(i).unpack(torch.bfloat16)) == bits(plain[16 * i : 16 * (i + 1)])


def test_what_does_not_fit_is_refused_by_name() -> None:
    weight, x = pack_lossless(trained(16, 256)), torch.randn(2, 256).to(torch.bfloat16)
    cut = replace(weight, codes=weight.codes[:, :-1].contiguous())
    for bad, said in (
        (cut, "weight.codes"),
        (replace(weight, palettes=weight.palettes[1:]), "weight.palettes"),
        (replace(weight, starts=weight.starts.long()), "weight.starts"),
        (replace(weight, columns=255), "weight.columns"),
    ):
        with pytest.raises(ArgumentError, match=said):
            lossless_linear(x, bad)
    with pytest.raises(ArgumentError, match="float16"):
        lossless_linear(x.half(), weight)
    with pytest.raises(ArgumentError, match="plain"):
        pack_lossless(torch.randn(4, 4))
    with pytest.raises(ArgumentError, match="plain"):
        encode_lossless(trained(4, 200).t(), weight)


def test_a_number_that_the_table_lacks_spoils_no_other_row() -> None:
    if (
        not isinstance(weight := pack_lossless(trained(8, 130)), LosslessWeight)
        or torch.get_default_device().type != "cpu"
    ):
        pytest.skip("of the CPU library")
    from pilotlight.kernels.cpu import library

    if library.loaded is None:
        pytest.skip("torch raises")
    found = lossless_rows(torch.tensor([3, 8, -1, 0]), weight, torch.bfloat16)
    assert found[[1, 2]].isnan().all()
    assert torch.equal(found[[0, 3]], weight.unpack(torch.bfloat16)[[3, 0]])


@pytest.mark.cpu_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products_of_many_rows_are_the_plain_ones_wherever_tiles_and_chains_end(dtype: torch.dtype) -> None:
    """Test the decoding of weights ahead of their products, also at ends of tiles and column chains.

    While one chain is multiplied, the next one is decoded.
    """
    with computing_with("C library"):
        for outputs in (1, 6, 8, 13, 50, 97):
            for columns in (20, 1024, 2177):
                plain = trained(outputs, columns, outliers=40)
                expected, coded = PlainWeight(plain.to(dtype)), pack_lossless(plain)
                for tokens in (25, 64, 130):
                    x = torch.randn(tokens, columns).to(dtype)
                    assert torch.equal(coded.linear(x).isnan(), expected.linear(x).isnan())
                    assert torch.equal(coded.linear(x).nan_to_num(), expected.linear(x).nan_to_num())
                    if outputs % 2 == 0:
                        gated = coded.gated(x, None, silu_and_mul), expected.gated(x, None, silu_and_mul)
                        assert torch.equal(gated[0].nan_to_num(), gated[1].nan_to_num())

"""Layouts of four-bit weights: as quantizers write them, and after loading."""

from typing import NamedTuple

import pytest
import torch

from pilotlight.engine.weights.formats.int4_layouts import Awq, CompressedTensors, Gptq, Int4Layout, unpack_words
from pilotlight.kernels.matrices.int4 import Int4Weight, pack_int4, unpack_int4


def test_a_word_has_its_first_code_in_its_lowest_bits() -> None:
    assert unpack_words(torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)).tolist() == [
        [*range(8), 8, 9, 10, 11, 12, 13, 14, 15]
    ]


class Known(NamedTuple):
    """A matrix of two rows and 64 columns in groups of 32.

    The codes of the first row are the column modulo 16, those of the second row 15 minus that.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    values: torch.Tensor


@pytest.fixture
def known() -> Known:
    codes = torch.stack((torch.arange(64) % 16, 15 - torch.arange(64) % 16))
    scales, zeros = torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[3, 9], [1, 15]])
    return Known(codes, scales, zeros, (codes - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1))


def word(*codes: int) -> int:
    value = sum(code << 4 * i for i, code in enumerate(codes))
    return value - 2**32 if value >= 2**31 else value


def words_along_rows(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 8)).tolist()
    return torch.tensor(
        [[word(*(row[i + j] for j in order)) for i in range(0, len(row), 8)] for row in padded], dtype=torch.int32
    )


def values_of(layout: Int4Layout, codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    packed = pack_int4(layout.codes(codes)[:2, :64])
    return unpack_int4(Int4Weight(packed, layout.scales(scales), layout.zeros(zeros)[:2], 64, 32), torch.float32)


def test_compressed_tensors_are_unpacked(known: Known) -> None:
    codes, zeros = words_along_rows(known.codes), words_along_rows(known.zeros.T).T
    assert torch.equal(values_of(CompressedTensors(), codes, zeros, known.scales), known.values)


@pytest.mark.parametrize("version", [1, 2])
def test_gptq_is_unpacked(known: Known, version: int) -> None:
    codes, zeros = words_along_rows(known.codes).T, words_along_rows(known.zeros.T - (1 if version == 1 else 0))
    assert torch.equal(values_of(Gptq(version), codes, zeros, known.scales.T), known.values)


def test_awq_is_unpacked(known: Known) -> None:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros = words_along_rows(known.codes.T, order), words_along_rows(known.zeros.T, order)
    assert torch.equal(values_of(Awq(), codes, zeros, known.scales.T), known.values)

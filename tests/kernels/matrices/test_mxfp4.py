"""MXFP4 compared with values computed by hand from the format's tables."""

import pytest
import torch

from pilotlight.kernels.matrices.mxfp4 import unpack_mxfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def unpack(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    into = torch.empty(*scales.shape[:-1], scales.shape[-1] * 32, dtype=dtype)
    unpack_mxfp4(blocks, scales, into)
    return into


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_known_bytes_are_known_values(dtype: torch.dtype) -> None:
    codes = [*range(16), *reversed(range(16))]
    block = torch.tensor([low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)])
    blocks = block.byte().expand(3, 2, 16)
    scales = torch.tensor([[127, 128], [124, 0], [252, 130]]).byte()
    unpacked = unpack(blocks, scales, dtype).double().view(3, 2, 32)
    exact = torch.tensor([VALUES[code] for code in codes]).double()
    powers = [[1.0, 2.0], [0.125, 2.0**-127], [2.0**125, 8.0]]
    for row in range(3):
        for block_of_row in range(2):
            assert torch.equal(unpacked[row, block_of_row], exact * powers[row][block_of_row])


def test_the_scale_that_is_no_number_spoils_its_block_alone() -> None:
    unpacked = unpack(torch.full((1, 2, 16), 0x11).byte(), torch.tensor([[255, 127]]).byte(), torch.float32)
    assert bool(unpacked[0, :32].isnan().all())
    assert unpacked[0, 32:].tolist() == [0.5] * 32


def test_rows_may_be_spread_over_strided_storage() -> None:
    blocks, scales = torch.randint(0, 256, (10, 1, 16)).byte(), torch.randint(120, 134, (10, 1)).byte()
    storage = torch.empty(2, 5, 32)
    unpack_mxfp4(blocks, scales, storage.transpose(0, 1))
    plain = unpack(blocks, scales, torch.float32)
    assert torch.equal(storage[0], plain[0::2])
    assert torch.equal(storage[1], plain[1::2])

"""MXFP4 in gpt-oss checkpoints: the experts of a layer share one tensor of blocks and one of scales."""

import torch

from pilotlight.engine.weights.formats.format import Index, WeightFormat, WeightRequests, as_stored
from pilotlight.engine.weights.shard import ExpertStack, require_units
from pilotlight.engine.weights.stored_tensor import ExpectedTensor
from pilotlight.kernels.cpu import library
from pilotlight.kernels.matrices.mxfp4 import BLOCK, Mxfp4Weight, repack_mxfp4, unpack_mxfp4

_PACKED = ("U8",)


class Mxfp4Format(WeightFormat):
    __slots__ = ()

    def stays_packed(self, device: torch.device) -> bool:
        return device.type == "cuda" or (device.type == "cpu" and library.takes_codes())

    def holds(self, index: Index, name: str) -> bool:
        return f"{name}_blocks" in index or f"{name}_scales" in index

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        """Request all experts, unpacked one after another: a second copy of all may not fit in memory."""
        loader.fill(as_stored(into, stack.are_pairs), _stored(stack), _unpack_each)

    def lay_out_stack(self, loader: WeightRequests, stack: ExpertStack) -> Mxfp4Weight:
        blocks, scales = _stored(stack)
        num_rows, columns = stack.rows.size, stack.columns.size
        codes = loader.take(f"{stack.name}_codes", (stack.experts, num_rows, columns // 2), torch.uint8)
        powers = loader.take(f"{stack.name}_scales", (stack.experts, num_rows, columns // BLOCK), torch.uint8)
        loader.fill(as_stored(codes, stack.are_pairs), [blocks], _repack)
        # As floats of type e8m0, so that the code of NaN is refused like any other NaN.
        loader.fill(as_stored(powers.view(torch.float8_e8m0fnu), stack.are_pairs), [scales], _copy_scales)
        return Mxfp4Weight(codes, powers)


def read_mxfp4(_: object) -> Mxfp4Format:
    return Mxfp4Format()


def _stored(stack: ExpertStack) -> list[ExpectedTensor]:
    require_units(stack.columns, BLOCK, stack.name, "columns under one scale")
    groups = stack.columns.over(BLOCK)
    return [
        ExpectedTensor.of(f"{stack.name}_blocks", (stack.experts, stack.rows, groups, BLOCK // 2), _PACKED),
        ExpectedTensor.of(f"{stack.name}_scales", (stack.experts, stack.rows, groups), _PACKED),
    ]


def _unpack_each(into: torch.Tensor, blocks: torch.Tensor, scales: torch.Tensor) -> None:
    for part, part_blocks, part_scales in zip(into, blocks, scales, strict=True):
        unpack_mxfp4(part_blocks, part_scales, part)


def _repack(into: torch.Tensor, blocks: torch.Tensor) -> None:
    into.copy_(repack_mxfp4(blocks).view(into.shape))


def _copy_scales(into: torch.Tensor, scales: torch.Tensor) -> None:
    into.view(torch.uint8).copy_(scales.reshape(into.shape))

"""Plain matrices: a tensor each, or one for all experts of a layer, transposed."""

import torch

from pilotlight.engine.weights.checkpoint import ExpectedTensor
from pilotlight.engine.weights.formats.format import FLOATS, Index, WeightFormat, WeightRequests, as_stored
from pilotlight.engine.weights.shard import ExpertStack, MatrixPart


class PlainFormat(WeightFormat):
    __slots__ = ()

    def stays_packed(self, device: torch.device) -> bool:
        return False

    def holds(self, index: Index, name: str) -> bool:
        return True

    def fill(self, loader: WeightRequests, part: MatrixPart, into: torch.Tensor) -> None:
        loader.fill(into, [ExpectedTensor.of(f"{part.name}.weight", (part.rows, part.columns), FLOATS)], None)

    def fill_stack(self, loader: WeightRequests, stack: ExpertStack, into: torch.Tensor) -> None:
        stored = ExpectedTensor.of(stack.name, (stack.experts, stack.columns, stack.rows), FLOATS)
        ordered = as_stored(into, stack.are_pairs)

        def turn(into: torch.Tensor, stored: torch.Tensor) -> None:
            into.copy_(torch.unflatten(stored, 2, into.shape[1:3]).permute(0, 2, 3, 1))

        loader.fill(ordered, [stored], turn)


PLAIN = PlainFormat()

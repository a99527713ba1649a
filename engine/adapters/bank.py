"""The slots of a model's adapters on its device, in one tensor at a fixed address.

Because of the fixed address, recorded steps remain valid when another adapter is loaded into a slot. Slots have the size of the first adapter's rank
class; an adapter of a larger class causes a new layout. This module knows tensors, and is independent of which adapter is in which slot.
"""

from collections.abc import Sequence

import torch

from pilotlight.engine.adapters.content import SlotContent, read_content, slot_size
from pilotlight.engine.adapters.peft import AdapterError
from pilotlight.engine.adapters.rows import AdapterRows
from pilotlight.engine.api.protocol import AdapterSource
from pilotlight.engine.weights.shard import MatrixPart, Stage


class AdapterBank:
    def __init__(
        self,
        projections: Sequence[MatrixPart],
        dtype: torch.dtype,
        device: torch.device,
        num_slots: int,
        stage: Stage | None = None,
    ) -> None:
        """`stage`: the pipeline stage that has the projections; None if they are those of the whole model."""
        self.num_slots = num_slots
        self._stage = stage
        self._projections = projections
        self._dtype = dtype
        self._rank = 0
        self._slot_size = 0
        self._values = torch.empty(0, dtype=dtype, device=device)
        self._places = torch.zeros(num_slots, len(projections), 3, dtype=torch.int64, device=device)

    def rows(self, slots: torch.Tensor) -> AdapterRows:
        return AdapterRows(self._values, self._places, slots)

    def read(self, source: AdapterSource) -> SlotContent:
        """Read an adapter, from any thread. Raises AdapterError."""
        content = read_content(source, self._projections, self._dtype, self._stage)
        return content._replace(values=content.values.pin_memory()) if self._values.is_cuda else content

    def fits(self, content: SlotContent) -> bool:
        """True if the slots are large enough."""
        return content.rank <= self._rank

    @torch.inference_mode()
    def grow(self, rank: int) -> None:
        """Lay out the slots for a larger class of ranks, which invalidates recorded steps.

        Raises AdapterError if there is not enough memory.
        """
        size = slot_size(self._projections, rank)
        try:
            values = torch.empty(self.num_slots * size, dtype=self._dtype, device=self._values.device)
        except RuntimeError as error:
            taken = self.num_slots * size * self._dtype.itemsize
            raise AdapterError(
                f"there is no memory for {self.num_slots} slots of rank {rank}, {taken} bytes: {error}"
            ) from None
        values.view(self.num_slots, -1)[:, : self._slot_size] = self._values.view(self.num_slots, -1)
        moved = torch.arange(self.num_slots, device=values.device).view(-1, 1, 1) * (size - self._slot_size)
        self._places[..., :2] += moved * (self._places[..., 2:] > 0)
        self._rank, self._slot_size, self._values = rank, size, values

    @torch.inference_mode()
    def place(self, slot: int, content: SlotContent) -> None:
        """Copy an adapter to a slot, in the device's order of work: running steps still read the old adapter."""
        begin = slot * self._slot_size
        self._values[begin : begin + len(content.values)].copy_(content.values, non_blocking=True)
        places = content.places + torch.tensor([begin, begin, 0])
        places[content.places[:, 2] == 0] = 0
        self._places[slot].copy_(places.pin_memory() if self._places.is_cuda else places, non_blocking=True)

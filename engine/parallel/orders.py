"""The orders that the first rank sends to the others, in the order of its work."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.protocol import AdapterSource, ModelSpec
from pilotlight.engine.core.step import StepInput

if TYPE_CHECKING:
    import torch


class LoadPart(NamedTuple):
    """Lay out and fill this rank's part of a model, whose blocks start at `first_slab` of its arena."""

    spec: ModelSpec
    context_length: int
    first_slab: int
    num_blocks: int
    checkpoint: bytes = (
        b""  # content fingerprint of the first rank's checkpoint; empty if all ranks read the same files
    )


class WarmUpPart(NamedTuple):
    model: str
    prompt: tuple[int, ...]
    with_decode: bool


class ComputeStep(NamedTuple):
    model: str
    step: StepInput


class GuessTokens(NamedTuple):
    """Compute a step of the model's drafter."""

    model: str
    step: StepInput


class FinishStep(NamedTuple):
    """Compute the logits of a step that has passed all stages. Only ranks of the first stage do this."""

    model: str
    number: int  # number of the step


class ScrubBlocks(NamedTuple):
    model: str
    blocks: Sequence[int]


class ResetBlocks(NamedTuple):
    model: str


class ClearSlab(NamedTuple):
    """Zero a slab of the arena that no model uses."""

    slab: int


class ReadAdapter(NamedTuple):
    """Read this rank's part of an adapter, which will be placed soon."""

    model: str
    source: AdapterSource


class PlaceAdapter(NamedTuple):
    model: str
    slot: int
    source: AdapterSource


class EncodeImage(NamedTuple):
    """Encode the next piece of an image on every rank; the ranks sum partial results."""

    model: str
    name: bytes
    piece: "torch.Tensor"


class DropImage(NamedTuple):
    model: str
    name: bytes


class DropModel(NamedTuple):
    model: str


class StoreBlocks(NamedTuple):
    """Send the bytes of these blocks in order; the first rank stores them with those of other ranks."""

    model: str
    blocks: Sequence[int]


class FetchBlocks(NamedTuple):
    """Fill these blocks with the bytes that follow on the channel."""

    model: str
    blocks: Sequence[int]


class RankReply(NamedTuple):
    """The reply to an order; without a `problem` the order was executed."""

    model: str
    problem: str | None = None

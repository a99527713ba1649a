"""What the first rank tells the others, in the order in which it does the same itself: every decision is its own."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pilotlight.engine.api.protocol import AdapterSource, ModelSpec
from pilotlight.engine.core.step import StepInput

if TYPE_CHECKING:
    import torch


class LoadPart(NamedTuple):
    """Lay out and fill this rank's part of a model, whose blocks lie in that part of its arena."""

    spec: ModelSpec
    context_length: int
    first_slab: int
    num_blocks: int
    checkpoint: bytes = b""  # the content fingerprint of the first rank's; b"": the ranks read the same files


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
    """Compute the logits of a step that the other stages have computed: for the ranks of the first one."""

    model: str
    number: int  # of the step


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
    """Encode the next piece of an image, as every rank does for itself: what goes between ranks are sums."""

    model: str
    name: bytes
    piece: "torch.Tensor"


class DropImage(NamedTuple):
    model: str
    name: bytes


class DropModel(NamedTuple):
    model: str


class StoreBlocks(NamedTuple):
    """Send these blocks' bytes, one behind the other: they are kept beside the other ranks'."""

    model: str
    blocks: Sequence[int]


class FetchBlocks(NamedTuple):
    """Fill these blocks with the bytes that follow."""

    model: str
    blocks: Sequence[int]


class RankReply(NamedTuple):
    """The answer to an order that is waited for; without a problem, it is done."""

    model: str
    problem: str | None = None
